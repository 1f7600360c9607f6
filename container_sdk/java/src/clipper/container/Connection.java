package clipper.container;

import java.io.Closeable;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.StandardProtocolFamily;
import java.net.StandardSocketOptions;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.SocketChannel;
import java.util.concurrent.locks.ReentrantLock;

/** A connection to the server. Threads: one reads; any may send. */
final class Connection implements AutoCloseable {
  /** A stop of this process was requested. */
  static final class Stopping extends Exception {
    private static final long serialVersionUID = 1L;
  }

  static final int READ_BYTES = 64 << 10;
  static final long ATTEMPT_MS = 10_000; // to connect and to receive WELCOME
  private static final long SPIN_NS = 50_000;
  private static final int SPIN_SCORE_MAX = 16;
  private static final int SPIN_TRIAL = 64;

  private final SocketChannel channel;
  private final Selector readable;
  private final Selector writable;
  private final ReentrantLock sending = new ReentrantLock();
  private final boolean spins = Runtime.getRuntime().availableProcessors() > 1;
  private ByteBuffer buffer = direct(READ_BYTES + Header.BYTES);
  private int filled;
  private int used;
  private int spinScore;
  private int spinCount;
  private long silenceMs = ATTEMPT_MS;
  private volatile boolean stopping;
  volatile long lastSentNs = System.nanoTime();

  /** Connect to unix:/path or tcp:host:port. Throws: IOException; IllegalArgumentException. */
  Connection(String address) throws IOException {
    Selector[] selectors = new Selector[2];
    SocketChannel connected = null;
    try {
      connected = connected(address);
      for (int i = 0; i < 2; i++) {
        selectors[i] = Selector.open();
        connected.register(selectors[i], i == 0 ? SelectionKey.OP_READ : SelectionKey.OP_WRITE);
      }
    } catch (IOException | RuntimeException | Error error) {
      closeAll(connected, selectors[0], selectors[1]);
      throw error;
    }
    channel = connected;
    readable = selectors[0];
    writable = selectors[1];
  }

  private static SocketChannel connected(String address) throws IOException {
    boolean unix = address.startsWith("unix:") && address.length() > 5;
    SocketAddress place = unix ? UnixDomainSocketAddress.of(address.substring(5)) : tcpPlace(address);
    SocketChannel channel =
        unix ? SocketChannel.open(StandardProtocolFamily.UNIX) : SocketChannel.open();
    try {
      if (place instanceof InetSocketAddress named) {
        channel.socket().connect(
            new InetSocketAddress(named.getHostString(), named.getPort()), (int) ATTEMPT_MS);
        channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
        channel.setOption(StandardSocketOptions.SO_KEEPALIVE, true);
      }
      channel.configureBlocking(false);
      // A blocking connect to a server that accepts nobody would last for ever.
      if (unix && !channel.connect(place)) {
        throw new Disconnected("cannot connect: the server accepts no connection now");
      }
      return channel;
    } catch (IOException | RuntimeException | Error error) {
      channel.close();
      throw error;
    }
  }

  /** Close what there is, whatever closing a part of it raises. */
  private static void closeAll(Closeable... parts) throws IOException {
    IOException first = null;
    for (Closeable part : parts) {
      try {
        if (part != null) {
          part.close();
        }
      } catch (IOException error) {
        first = first == null ? error : first;
      }
    }
    if (first != null) {
      throw first;
    }
  }

  /** Return host and port of tcp:host:port, not looked up. Throws: IllegalArgumentException. */
  static InetSocketAddress tcpPlace(String address) {
    int colon = address.lastIndexOf(':');
    if (!address.startsWith("tcp:") || colon <= 4) {
      throw new IllegalArgumentException(
          "cannot connect to '" + address + "': write unix:/path or tcp:host:port");
    }
    String host = address.substring(4, colon).replaceAll("^\\[|]$", "");
    return InetSocketAddress.createUnresolved(
        host, Integer.parseInt(address.substring(colon + 1)));
  }

  private static ByteBuffer direct(int size) {
    return Rows.littleEndian(ByteBuffer.allocateDirect(size));
  }

  /** Set how long the server may be silent; 0 for no limit. */
  void setSilence(long milliseconds) {
    silenceMs = milliseconds;
  }

  /** Have nextMessage() throw Stopping. Any thread. */
  void stop() {
    stopping = true;
    readable.wakeup();
  }

  /** Return the buffer of the current message; its bytes are valid until nextMessage(). */
  ByteBuffer buffer() {
    return buffer;
  }

  /** Return true if bytes wait, or a stop is requested. */
  boolean isReadable() throws IOException {
    if (filled == used && !stopping && filled < buffer.capacity()) {
      receive(buffer.capacity());
    }
    return filled > used || stopping;
  }

  /** Wait for a message and place its first byte at `offset`. */
  void nextMessage(int offset) throws IOException, Stopping {
    int rest = filled - used;
    if (buffer.capacity() < offset + rest + READ_BYTES) {
      grow(offset + rest + READ_BYTES);
    }
    if (rest > 0 && used != offset) {
      buffer.put(offset, buffer.duplicate(), used, rest);
    }
    used = offset;
    filled = offset + rest;
    if (stopping) {
      throw new Stopping();
    }
    if (rest == 0 && !spin()) {
      await();
    }
  }

  /** Receive the next `n` bytes of the message and return where they start in buffer(). */
  int take(int n) throws IOException {
    int end = used + n;
    while (filled < end) {
      if (buffer.capacity() == filled) {
        grow((int) Math.min(end, 2L * filled)); // memory grows as bytes arrive
      }
      if (!receive(Math.min(end, buffer.capacity()))) {
        select(readable, "the server stopped sending within a frame");
      }
    }
    int start = used;
    used = end;
    return start;
  }

  private void grow(int size) {
    ByteBuffer more = direct(size);
    more.put(0, buffer, 0, filled);
    buffer = more;
  }

  private void await() throws IOException, Stopping {
    do {
      select(readable, "the server has been silent for too long");
      if (stopping) {
        throw new Stopping();
      }
    } while (!receive(used + READ_BYTES));
  }

  private void select(Selector selector, String otherwise) throws IOException {
    long until = System.nanoTime() + silenceMs * 1_000_000;
    int ready = selector.select(silenceMs);
    selector.selectedKeys().clear();
    if (ready == 0 && silenceMs > 0 && System.nanoTime() >= until) {
      throw new Disconnected(otherwise);
    }
  }

  /**
   * Poll for SPIN_NS instead of sleeping, because a wake-up costs more than most models. Only with a
   * second core and while it pays.
   */
  private boolean spin() throws IOException {
    if (!spins || spinScore < 0 && ++spinCount % SPIN_TRIAL != 0) {
      return false;
    }
    long until = System.nanoTime() + SPIN_NS;
    do {
      if (receive(used + READ_BYTES)) {
        spinScore = Math.min(spinScore + 1, SPIN_SCORE_MAX);
        return true;
      }
    } while (!stopping && System.nanoTime() < until);
    spinScore = Math.max(spinScore - 1, -1);
    return false;
  }

  private boolean receive(int end) throws IOException {
    int count = channel.read(buffer.limit(end).position(filled));
    buffer.clear();
    if (count < 0) {
      throw new Disconnected("the server closed the connection");
    }
    filled += count;
    return count > 0;
  }

  /** Send a frame, from 0 to its limit. Throws: IOException, after which nothing can follow. */
  void send(ByteBuffer frame) throws IOException {
    sending.lock();
    try {
      frame.rewind();
      while (frame.hasRemaining()) {
        if (channel.write(frame) == 0) {
          select(writable, "the server stopped receiving");
        }
      }
      lastSentNs = System.nanoTime();
    } catch (IOException error) {
      abandon();
      throw error;
    } finally {
      sending.unlock();
    }
  }

  /** Close the connection; the thread that reads hears of it. Any thread. */
  void abandon() throws IOException {
    channel.close();
    readable.wakeup();
  }

  @Override
  public void close() throws IOException {
    closeAll(channel, readable, writable);
  }
}
