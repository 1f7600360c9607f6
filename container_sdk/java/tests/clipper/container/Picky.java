package clipper.container;

import java.nio.DoubleBuffer;
import java.util.Arrays;
import java.util.Map;

/**
 * A model of f64 rows that throws for a negative first element. The output of a row is its first
 * element, as often as the largest second element of the batch says; of 1000 alone it is a scalar.
 * The confidence is a tenth of the second element; a session is a qualifier.
 */
final class Picky implements Model {
  public static void main(String[] words) {
    Container.run(new Picky(), new Options("any", "any").retrySingly().sessions());
  }

  @Override
  public void predict(Batch batch, Outputs outputs) {
    DoubleBuffer all = batch.doubles();
    int width = 1;
    for (int i = 0; i < batch.size(); i++) {
      if (all.get(batch.start(i)) < 0) {
        throw new IllegalStateException("a negative row");
      }
      if (all.get(batch.start(i)) == 0) {
        throw new StackOverflowError();
      }
      width = Math.max(width, (int) all.get(batch.start(i) + 1));
    }
    boolean isScalar = batch.size() == 1 && all.get(batch.start(0)) == 1000;
    DoubleBuffer to = isScalar ? outputs.doubles() : outputs.doubles(width);
    for (int i = 0; i < batch.size(); i++) {
      double[] row = new double[width];
      Arrays.fill(row, all.get(batch.start(i)));
      to.put(i * width, row);
      double sure = all.get(batch.start(i) + 1);
      if (sure > 0) {
        outputs.confidence()[i] = (float) (sure / 10);
      }
      if (batch.session(i) != 0) {
        outputs.qualify(i, MessagePack.encode(Map.of("s", batch.session(i))));
      }
    }
  }
}
