package clipper.container;

import java.nio.LongBuffer;
import java.util.List;

/**
 * Named tensors: the sum of the ids, which is not negative, and each name twice. The schemas are
 * those of the server.
 */
final class Tensors implements Model {
  private final Schema inputs;
  private final Schema outputs;

  private Tensors(Options options) {
    inputs = Schema.parse(options.input);
    outputs = Schema.parse(options.output);
  }

  public static void main(String[] words) {
    Options options = new Options("any", "any").fromEnvironment(System.getenv());
    Container.run(new Tensors(options), options);
  }

  @Override
  public void predict(Batch batch, Outputs to) {
    for (int i = 0; i < batch.size(); i++) {
      TensorRecord row = new TensorRecord(inputs, batch, i);
      LongBuffer ids = row.values("ids", DType.I64).asLongBuffer();
      long sum = 0;
      while (ids.hasRemaining()) {
        sum += ids.get();
      }
      if (sum < 0) {
        throw new IllegalStateException("a negative sum");
      }
      RecordWriter writer = new RecordWriter(outputs);
      writer.values("sum", DType.I64).putLong(0, sum);
      if (outputs.specs().size() > 1) {
        String name = row.texts("name").get(0);
        writer.texts("names", List.of(name, name));
      }
      writer.putInto(to, i);
    }
  }
}
