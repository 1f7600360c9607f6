package clipper.container;

import java.nio.ByteBuffer;
import java.nio.FloatBuffer;

/** Returns each row as it came: numbers of a free length, text or bytes. The words say the types. */
final class Echo implements Model {
  public static void main(String[] words) {
    Container.run(new Echo(), new Options(words[0], words[1]));
  }

  @Override
  public void predict(Batch batch, Outputs outputs) {
    for (int i = 0; i < batch.size(); i++) {
      switch (batch.dtype()) {
        case STR -> outputs.add(batch.text(i));
        case BYTES -> {
          ByteBuffer bytes = batch.bytes(i);
          byte[] copy = new byte[bytes.remaining()];
          bytes.get(copy);
          outputs.add(copy);
        }
        default -> {
          FloatBuffer all = batch.floats();
          float[] row = new float[batch.length(i)];
          all.get(batch.start(i), row);
          outputs.add(row);
        }
      }
    }
  }
}
