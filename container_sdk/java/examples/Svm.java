import clipper.container.Batch;
import clipper.container.Container;
import clipper.container.Model;
import clipper.container.Options;
import clipper.container.Outputs;
import java.io.IOException;
import java.nio.DoubleBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;

/**
 * A linear SVM: the class of a row is the index of the largest w x + b. The file of weights has one
 * line per class: b, then w.
 */
public final class Svm implements Model {
  private final Path path;
  private double[][] weights;

  private Svm(Path path) {
    this.path = path;
  }

  public static void main(String[] words) {
    Container.run(new Svm(Path.of(words.length > 0 ? words[0] : "svm.txt")), new Options("f64[*]", "i64"));
  }

  @Override
  public void load() throws IOException {
    try (Stream<String> lines = Files.lines(path)) {
      weights = lines.map(Svm::numbers).toArray(double[][]::new);
    }
  }

  private static double[] numbers(String line) {
    return Stream.of(line.strip().split("\\s+")).mapToDouble(Double::parseDouble).toArray();
  }

  @Override
  public void predict(Batch batch, Outputs outputs) {
    DoubleBuffer values = batch.doubles();
    LongBuffer classes = outputs.longs();
    for (int i = 0; i < batch.size(); i++) {
      classes.put(i, best(values, batch.start(i), batch.length(i)));
    }
  }

  private long best(DoubleBuffer values, int start, int length) {
    int best = 0;
    double bestScore = Double.NEGATIVE_INFINITY;
    for (int c = 0; c < weights.length; c++) {
      double[] w = weights[c];
      if (length + 1 != w.length) {
        throw new IllegalArgumentException("a row of " + length + " numbers");
      }
      double score = w[0];
      for (int i = 0; i < length; i++) {
        score += w[i + 1] * values.get(start + i);
      }
      if (score > bestScore) {
        best = c;
        bestScore = score;
      }
    }
    return best;
  }
}
