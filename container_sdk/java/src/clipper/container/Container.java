package clipper.container;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.BooleanSupplier;

/**
 * Runs a model as a replica of a clipper server.
 *
 * <pre>
 * public static void main(String[] words) {
 *   Container.run((batch, outputs) -&gt; outputs.doubles(), new Options("any", "f64"));
 * }
 * </pre>
 *
 * <p>`clipper deploy svm --command "java -jar svm.jar"` starts it with the environment variables that
 * Options.fromEnvironment reads (docs/sdk-cpp-java.md).
 */
public final class Container implements Serving {
  static final int EXIT_USAGE = 2;
  static final int EXIT_LOAD_FAILED = 3;
  static final int EXIT_REJECTED = 4;
  private static final String SDK = "java/1.0";
  private static final int SILENCE_HEARTBEATS = 6;
  static final long BACKOFF_MS_MIN = 100;
  static final long BACKOFF_MS_MAX = 10_000;
  private static final int FEEDBACK_FRAMES_MAX = 256; // and as many bytes as one payload may have
  private static final long COMPLAIN_NS = 5_000_000_000L;
  private static final long STOP_S = 60; // for the batch that runs when a stop is requested

  /** Feedback that waits. bytes: the memory of its rows. */
  private record Feedback(Rows inputs, Rows labels, long bytes) {}

  private final Model model;
  private final Options options;
  private final String address;
  private final WarmUp warm;
  private final ReentrantLock turn; // held while the model runs
  private final Header header = new Header();
  private final Rows rows = new Rows();
  private final Outputs outputs = new Outputs();
  private final ArrayDeque<Feedback> feedback = new ArrayDeque<>();
  private long feedbackBytes;
  private final CountDownLatch stopRequested = new CountDownLatch(1);
  private Connection connection;
  private long backoffMs = BACKOFF_MS_MIN;
  private String lastError = "";
  private String complaint = "";
  private long complaintNs;
  private long learned;
  private long failed;
  private double accuracy = Double.NaN;

  /** Create a container and warm its model up. The model must be loaded. */
  public Container(Model model, Options options) {
    this(model, options, options.address, new WarmUp(model, options).run(), new ReentrantLock());
  }

  /** Create a container of one server of several, which share the model by turns. */
  Container(Model model, Options options, String address, WarmUp warm, ReentrantLock turn) {
    this.model = model;
    this.options = options;
    this.address = address;
    this.warm = warm;
    this.turn = turn;
  }

  /**
   * Load a model and serve it until SIGTERM or the server's GOODBYE, then exit: 0 stopped on request,
   * 2 wrong usage, 3 the model did not load, 4 the server rejected it.
   *
   * <p>options: those that the environment names are overwritten.
   */
  public static void run(Model model, Options options) {
    try {
      options.fromEnvironment(System.getenv());
    } catch (IllegalArgumentException error) {
      System.err.println(error.getMessage());
      System.exit(EXIT_USAGE);
    }
    if (options.name.isEmpty() || options.address.isEmpty()) {
      System.err.println(
          "CLIPPER_MODEL and CLIPPER_ADDRESS are not set. Start this program by: clipper deploy NAME"
              + " --command PROGRAM");
      System.exit(EXIT_USAGE);
    }
    try {
      model.load();
    } catch (Throwable error) {
      System.err.println("model '" + options.name + "' failed to load:\n" + Evaluation.trace(error));
      System.exit(EXIT_LOAD_FAILED);
    }
    CountDownLatch ended = new CountDownLatch(1);
    int code = 0;
    try {
      boolean several = options.allServers || options.address.contains(",");
      Serving serving =
          several ? new AllServers(model, options) : new Container(model, options);
      Runtime.getRuntime().addShutdownHook(new Thread(() -> stopAndWait(serving, ended)));
      serving.serve();
    } catch (Rejected error) {
      System.err.println("the server rejected this container: " + error.getMessage());
      code = EXIT_REJECTED;
    } catch (IllegalArgumentException error) {
      System.err.println(error.getMessage());
      code = EXIT_USAGE;
    } finally {
      ended.countDown();
    }
    System.exit(code);
  }

  private static void stopAndWait(Serving serving, CountDownLatch ended) {
    serving.stop();
    try {
      ended.await(STOP_S, TimeUnit.SECONDS);
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
    }
  }

  @Override
  public void stop() {
    stopRequested.countDown();
    synchronized (this) {
      if (connection != null) {
        connection.stop();
      }
    }
  }

  /**
   * Answer batches until the server says GOODBYE or stop() is called. Throws: Rejected;
   * IllegalArgumentException for an invalid address.
   */
  @Override
  public void serve() throws Rejected {
    serveWhile(() -> true);
  }

  /** Serve, and connect again after a lost connection only while the address is wanted. */
  void serveWhile(BooleanSupplier isWanted) throws Rejected {
    try {
      while (true) {
        try {
          serveOnce();
          return;
        } catch (IOException | BadFrame error) {
          logOnce(error.getMessage());
        } catch (OutOfMemoryError error) {
          logOnce("no memory for a frame");
        }
        if (!isWanted.getAsBoolean()) {
          return;
        }
        long pauseMs = ThreadLocalRandom.current().nextLong(backoffMs / 2, backoffMs + 1);
        if (stopRequested.await(pauseMs, TimeUnit.MILLISECONDS)) {
          return;
        }
        backoffMs = Math.min(BACKOFF_MS_MAX, backoffMs * 2);
      }
    } catch (Connection.Stopping | InterruptedException stopped) {
      return;
    }
  }

  private void logOnce(String why) {
    if (!lastError.equals(why)) {
      lastError = String.valueOf(why);
      System.err.println(
          "model '" + options.name + "': " + address + ": " + why + "; reconnecting");
    }
  }

  /** Return the payload of HELLO. */
  byte[] hello() {
    boolean tcp = address.startsWith("tcp:");
    boolean two = options.protocol == 2;
    boolean usual = !options.corrects && two && options.aliveFile.isEmpty();
    Map<String, Object> fields = new LinkedHashMap<>();
    fields.put("quiet", usual && !tcp);
    fields.put("sparse", usual && tcp);
    fields.put("crc", tcp && two);
    if (!warm.output.isEmpty()) {
      fields.put("timings", warm.timings);
      fields.put("gives", warm.output);
    }
    if (!warm.error.isEmpty()) {
      fields.put("warm_error", warm.error);
    }
    fields.put("name", options.name);
    fields.put("version", options.version);
    fields.put("replica", options.replica);
    fields.put("input", options.input);
    fields.put("output", options.output);
    fields.put("batch_max", options.batchMax);
    fields.put("protocol", options.protocol);
    fields.put("token", options.token);
    fields.put("pid", ProcessHandle.current().pid());
    fields.put("sdk", SDK);
    fields.put("corrects", options.corrects && two);
    fields.put("sessions", options.sessions && two);
    return MessagePack.encode(fields);
  }

  private void serveOnce() throws IOException, Rejected, Connection.Stopping {
    try (Connection opened = new Connection(address)) {
      synchronized (this) {
        connection = opened;
      }
      if (stopRequested.getCount() == 0) {
        return;
      }
      opened.send(Wire.controlFrame(Kind.HELLO, hello(), 0, false));
      Welcome welcome = readWelcome();
      backoffMs = BACKOFF_MS_MIN;
      lastError = "";
      Heart.touch(options.aliveFile);
      if (options.protocol == 1) {
        opened.setSilence(0); // version 1 has no heartbeats
        while (true) {
          answerV1(welcome);
        }
      }
      opened.setSilence(welcome.quiet() ? 0 : SILENCE_HEARTBEATS * welcome.heartbeatMs());
      serveFrames(welcome);
    }
  }

  private void serveFrames(Welcome welcome) throws IOException, Connection.Stopping {
    Heart heart = welcome.quiet() ? null : new Heart(connection, welcome, options.aliveFile);
    feedback.clear();
    feedbackBytes = 0;
    learned = 0;
    failed = 0;
    accuracy = Double.NaN;
    try {
      while (answer(welcome, heart)) {
        continue;
      }
      sendGoodbye();
    } catch (Connection.Stopping stopped) {
      sendGoodbye();
      throw stopped;
    } finally {
      if (heart != null) {
        heart.stop();
      }
    }
  }

  private void sendGoodbye() {
    try {
      connection.send(Wire.controlFrame(Kind.GOODBYE, new byte[0], 0, false));
    } catch (IOException error) {
      return;
    }
  }

  private Welcome readWelcome() throws IOException, Rejected, Connection.Stopping {
    connection.nextMessage(0);
    int at = connection.take(Header.BYTES);
    header.decode(connection.buffer(), at, Wire.CONTROL_BYTES_MAX);
    at = connection.take(header.payloadBytes);
    header.checkPayload(connection.buffer(), at);
    ByteBuffer payload = Wire.slice(connection.buffer(), at, header.payloadBytes);
    if (header.kind == Kind.REFUSE) {
      throw new Rejected(StandardCharsets.UTF_8.decode(payload).toString());
    }
    if (header.kind != Kind.WELCOME) {
      throw new BadFrame("expected WELCOME or REFUSE, got " + header.kind);
    }
    return Welcome.read(MessagePack.decode(payload));
  }

  /** Read one frame and answer it. Return false after GOODBYE. */
  private boolean answer(Welcome welcome, Heart heart) throws IOException, Connection.Stopping {
    while (!feedback.isEmpty() && !connection.isReadable()) {
      learn(heart);
    }
    connection.nextMessage(0);
    int at = connection.take(Header.BYTES);
    header.decode(connection.buffer(), at, welcome.payloadBytesMax());
    at = connection.take(header.payloadBytes);
    if (header.kind == Kind.PREDICT) {
      Wire.openRows(header, connection.buffer(), at, rows, welcome.payloadBytesMax());
      reply(welcome, header.id);
    } else if (header.kind == Kind.FEEDBACK && options.corrects) {
      queueFeedback(at, welcome);
    } else if (header.kind == Kind.GOODBYE) {
      return false;
    } else if (header.kind != Kind.HEARTBEAT) {
      throw new BadFrame("unexpected " + header.kind);
    }
    return true;
  }

  private void queueFeedback(int at, Welcome welcome) {
    ByteBuffer copy = Rows.littleEndian(ByteBuffer.allocate(header.payloadBytes));
    copy.put(0, connection.buffer(), at, header.payloadBytes);
    Rows[] both = Wire.openFeedback(header, copy, 0, welcome.payloadBytesMax());
    long bytes = Math.max(copy.limit(), both[0].data.limit() + both[1].data.limit());
    feedback.add(new Feedback(both[0], both[1], bytes));
    feedbackBytes += bytes;
    long bytesMax = welcome.payloadBytesMax();
    while (feedback.size() > FEEDBACK_FRAMES_MAX || feedback.size() > 1 && feedbackBytes > bytesMax) {
      failed += nextFeedback().inputs().n;
      complain(
          "model '" + options.name
              + "': feedback arrives faster than correct() processes it; the oldest is dropped");
    }
  }

  private Feedback nextFeedback() {
    Feedback next = feedback.remove();
    feedbackBytes -= next.bytes();
    return next;
  }

  /** Run the model. Return the microseconds that it took, without the wait for its turn. */
  private long predict() throws Exception {
    turn.lock();
    try {
      long started = System.nanoTime();
      Evaluation.run(model, rows, options.retrySingly, outputs);
      return (System.nanoTime() - started) / 1000;
    } finally {
      turn.unlock();
    }
  }

  private void reply(Welcome welcome, long id) throws IOException {
    boolean qualified = welcome.qualifiers();
    long bytesMax = welcome.payloadBytesMax();
    ByteBuffer reply = null;
    long tookUs = 0;
    try {
      tookUs = predict();
      if (welcome.partial()) {
        outputs.checkParts(qualified, bytesMax);
      } else {
        reply = outputs.encode(id, tookUs, welcome.crc(), qualified, bytesMax);
      }
    } catch (Exception | Error error) {
      String why = "model '" + options.name + "': " + Evaluation.trace(error);
      complain(why);
      reply = Wire.textFrame(Kind.FAILURE, why, id, welcome.crc());
    }
    if (reply != null) {
      connection.send(reply);
    } else {
      outputs.sendParts(id, tookUs, welcome.crc(), qualified, bytesMax, connection::send);
    }
  }

  private void complain(String why) {
    long now = System.nanoTime();
    if (!why.equals(complaint) || now - complaintNs > COMPLAIN_NS) {
      System.err.println(why);
      complaint = why;
      complaintNs = now;
    }
  }

  private void answerV1(Welcome welcome) throws IOException, Connection.Stopping {
    connection.nextMessage(Header.BYTES - Wire.V1_HEAD_BYTES); // the content is aligned
    int at = connection.take(Wire.V1_HEAD_BYTES);
    int size = Wire.v1ContentBytes(connection.buffer(), at, welcome.payloadBytesMax());
    connection.take(size);
    Wire.openV1(connection.buffer(), at, size, rows, welcome.payloadBytesMax());
    ByteBuffer numbers;
    try {
      predict();
      numbers = outputs.numbers();
    } catch (Exception | Error error) {
      throw new Disconnected("the model failed, which version 1 cannot report: " + error);
    }
    connection.send(numbers);
  }

  private void learn(Heart heart) {
    turn.lock();
    try {
      correct();
      if (feedback.isEmpty() && heart != null) {
        heart.report(learned, failed, accuracy());
      }
    } finally {
      turn.unlock();
    }
  }

  private void correct() {
    Feedback next = nextFeedback();
    int rows = next.inputs().n;
    try {
      model.correct(new Batch(next.inputs()), new Batch(next.labels()));
      learned += rows;
    } catch (Exception | Error error) {
      failed += rows;
      complain("model '" + options.name + "': correct() failed:\n" + Evaluation.trace(error));
    }
  }

  private double accuracy() {
    try {
      accuracy = model.accuracy();
    } catch (Exception | Error error) {
      complain("model '" + options.name + "': accuracy() failed:\n" + Evaluation.trace(error));
    }
    return accuracy;
  }
}
