package clipper.container;

import java.io.IOException;

/** A model that does nothing, and loads until a line is on its input. */
final class Late implements Model {
  public static void main(String[] words) {
    Container.run(new Late(), new Options("any", "f64"));
  }

  @Override
  public void load() throws IOException {
    System.err.println("loads");
    while (System.in.read() != '\n') {
      continue;
    }
  }

  @Override
  public void predict(Batch batch, Outputs outputs) {
    outputs.doubles();
  }
}
