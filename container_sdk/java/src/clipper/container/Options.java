package clipper.container;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;

/**
 * How a model is served. The setters return this object.
 *
 * <p>input, output: types such as "f64[64]", "f32[*]", "str", "any".
 */
public final class Options {
  String input;
  String output;
  int batchMax;
  boolean corrects;
  boolean sessions;
  boolean retrySingly;
  int protocol = 2;
  String name = "";
  String address = "";
  String token = "";
  String warmup = "";
  String aliveFile = "";
  boolean allServers;
  long version = 1;
  long replica;

  /** Create options for a type of input and a type of output. */
  public Options(String input, String output) {
    this.input = input;
    this.output = output;
  }

  /** Set the most rows of a batch; 0 for no limit. */
  public Options batchMax(int rows) {
    batchMax = rows;
    return this;
  }

  /** Receive feedback: correct() is called. */
  public Options corrects() {
    corrects = true;
    return this;
  }

  /** Receive the session of each row. */
  public Options sessions() {
    sessions = true;
    return this;
  }

  /** Evaluate the rows of a batch that throws one by one, and fail only those that throw again. */
  public Options retrySingly() {
    retrySingly = true;
    return this;
  }

  /** Set the format of the batches, 1 or 2. */
  public Options protocol(int version) {
    protocol = version;
    return this;
  }

  /**
   * Overwrite the fields that the environment names: CLIPPER_ADDRESS, CLIPPER_TOKEN or
   * CLIPPER_TOKEN_FILE, CLIPPER_MODEL, CLIPPER_VERSION, CLIPPER_REPLICA, CLIPPER_INPUT,
   * CLIPPER_OUTPUT, CLIPPER_BATCH_MAX, CLIPPER_RETRY_SINGLY, CLIPPER_PROTOCOL, CLIPPER_WARMUP,
   * CLIPPER_ALL_SERVERS, CLIPPER_ALIVE_FILE. Throws: IllegalArgumentException for what is no number,
   * and if the file of the token cannot be read.
   */
  public Options fromEnvironment(Map<String, String> environment) {
    address = text(environment, "ADDRESS", address);
    token = text(environment, "TOKEN", token);
    name = text(environment, "MODEL", name);
    input = text(environment, "INPUT", input);
    output = text(environment, "OUTPUT", output);
    warmup = text(environment, "WARMUP", warmup);
    version = whole(environment, "VERSION", version, 0, Long.MAX_VALUE);
    replica = whole(environment, "REPLICA", replica, 0, Long.MAX_VALUE);
    batchMax = (int) whole(environment, "BATCH_MAX", batchMax, 0, Integer.MAX_VALUE);
    retrySingly = whole(environment, "RETRY_SINGLY", retrySingly ? 1 : 0, 0, 1) == 1;
    protocol = (int) whole(environment, "PROTOCOL", protocol, 1, 2);
    allServers = whole(environment, "ALL_SERVERS", allServers ? 1 : 0, 0, 1) == 1;
    aliveFile = text(environment, "ALIVE_FILE", aliveFile);
    String tokenFile = text(environment, "TOKEN_FILE", "");
    if (token.isEmpty() && !tokenFile.isEmpty()) {
      token = readToken(tokenFile);
    }
    return this;
  }

  private static String readToken(String file) {
    try {
      return Files.readString(Path.of(file)).strip();
    } catch (IOException error) {
      throw new IllegalArgumentException("CLIPPER_TOKEN_FILE: cannot read a token from " + file);
    }
  }

  private static long whole(
      Map<String, String> environment, String key, long otherwise, long least, long most) {
    String value = text(environment, key, "");
    if (value.isEmpty()) {
      return otherwise;
    }
    try {
      long number = Long.parseLong(value);
      if (Character.isDigit(value.charAt(0)) && number >= least && number <= most) {
        return number;
      }
    } catch (NumberFormatException error) {
      // said below
    }
    throw new IllegalArgumentException(
        "CLIPPER_" + key + " is '" + value + "': expected a number from " + least + " to " + most);
  }

  private static String text(Map<String, String> environment, String key, String otherwise) {
    String value = environment.getOrDefault("CLIPPER_" + key, "");
    return value.isEmpty() ? otherwise : value;
  }
}
