package clipper.container;

import java.io.PrintWriter;
import java.io.StringWriter;
import java.util.ArrayList;
import java.util.List;

/** Runs a batch on a model: whole, or row by row if it fails. */
final class Evaluation {
  private static final int TEXT_CHARS_MAX = 8 << 10;
  private static final int LINE_CHARS_MAX = 2000; // of the line that is repeated

  private Evaluation() {}

  /**
   * Evaluate a batch.
   *
   * <p>retrySingly: if the model throws, evaluate the rows one by one, and fail only those that
   * throw again. Throws: what the model throws; InvalidOutput, for which nothing is tried again;
   * AllRowsFailed.
   */
  static void run(Model model, Rows rows, boolean retrySingly, Outputs outputs) throws Exception {
    outputs.reset(rows.n);
    try {
      model.predict(new Batch(rows), outputs);
      return;
    } catch (InvalidOutput error) {
      throw error;
    } catch (Exception | Error error) {
      if (!retrySingly || rows.n == 1) {
        throw error;
      }
    }
    outputs.join(singly(model, rows));
  }

  private static List<Outputs.Single> singly(Model model, Rows rows) {
    List<Outputs.Single> singles = new ArrayList<>(rows.n);
    Outputs outputs = new Outputs();
    for (int i = 0; i < rows.n; i++) {
      outputs.reset(1);
      try {
        model.predict(new Batch(rows.row(i)), outputs);
        singles.add(outputs.single());
      } catch (Exception | Error error) {
        singles.add(Outputs.Single.failed(trace(error)));
      }
    }
    return singles;
  }

  /**
   * Return the stack trace of an error, at most TEXT_CHARS_MAX characters of it. Its last line is
   * the error again, with the first line of its message: the line that a server shows.
   */
  static String trace(Throwable error) {
    StringWriter text = new StringWriter();
    error.printStackTrace(new PrintWriter(text, true));
    String whole = text.toString().strip();
    String line = whole.lines().findFirst().orElse("");
    line = line.substring(0, Math.min(line.length(), LINE_CHARS_MAX));
    if (whole.endsWith(line) && whole.length() <= TEXT_CHARS_MAX) {
      return whole;
    }
    int most = TEXT_CHARS_MAX - line.length() - 1;
    return whole.substring(0, Math.min(whole.length(), most)) + "\n" + line;
  }
}
