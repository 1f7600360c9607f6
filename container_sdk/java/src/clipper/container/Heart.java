package clipper.container;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.attribute.FileTime;
import java.time.Instant;

/** Sends HEARTBEAT when nothing was sent for an interval, and ACCURACY as often; touches a file. */
final class Heart {
  private final Connection connection;
  private final Welcome welcome;
  private final String aliveFile;
  private final Thread thread = new Thread(this::beat, "clipper-heart");
  private byte[] news;

  Heart(Connection connection, Welcome welcome, String aliveFile) {
    this.connection = connection;
    this.welcome = welcome;
    this.aliveFile = aliveFile;
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
        touch(aliveFile);
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
    } catch (RuntimeException | Error unexpected) {
      System.err.println("no heartbeats any more: " + unexpected);
      abandon();
    }
  }

  private void abandon() {
    try {
      connection.abandon(); // the container connects again, with another heart
    } catch (IOException closed) {
      return;
    }
  }

  /** Set the modification time of a file to now, and create it if it is missing; "" is no file. */
  static void touch(String path) {
    if (path.isEmpty()) {
      return;
    }
    Path file = Path.of(path);
    try {
      try {
        Files.setLastModifiedTime(file, FileTime.from(Instant.now()));
      } catch (NoSuchFileException missing) {
        Files.createFile(file);
      }
    } catch (IOException error) {
      return; // its reader then finds no sign of life
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
