package clipper.container;

import java.io.IOException;
import java.nio.ByteBuffer;

/** Sends HEARTBEAT when nothing was sent for an interval, and ACCURACY as often. */
final class Heart {
  private final Connection connection;
  private final Welcome welcome;
  private final Thread thread = new Thread(this::beat, "clipper-heart");
  private byte[] news;

  Heart(Connection connection, Welcome welcome) {
    this.connection = connection;
    this.welcome = welcome;
    thread.setDaemon(true);
    thread.start();
  }

  /** Report this with the next heartbeat. accuracy: NaN if unknown. */
  synchronized void report(long learned, long failed, double accuracy) {
    boolean known = accuracy >= 0 && accuracy <= 1;
    ByteBuffer payload = Rows.littleEndian(ByteBuffer.allocate(known ? 24 : 16));
    payload.putLong(0, learned).putLong(8, failed);
    if (known) {
      payload.putDouble(16, accuracy);
    }
    news = payload.array();
  }

  private synchronized byte[] takeNews() {
    byte[] taken = news;
    news = null;
    return taken;
  }

  private void beat() {
    long everyNs = welcome.heartbeatMs() * 1_000_000;
    try {
      while (true) {
        long pauseNs = connection.lastSentNs + everyNs - System.nanoTime();
        Thread.sleep(Math.max(1, pauseNs / 1_000_000));
        byte[] taken = welcome.accuracy() ? takeNews() : null;
        if (taken != null) {
          connection.send(Wire.controlFrame(Kind.ACCURACY, taken, 0, false));
        }
        if (System.nanoTime() - connection.lastSentNs >= everyNs) {
          connection.send(Wire.controlFrame(Kind.HEARTBEAT, new byte[0], 0, false));
        }
      }
    } catch (IOException | InterruptedException ended) {
      return;
    }
  }

  /** End the thread. */
  void stop() {
    thread.interrupt();
    try {
      thread.join();
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
    }
  }
}
