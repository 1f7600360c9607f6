import clipper.container.Container;
import clipper.container.Options;

/** A model that does nothing: the output of each row is 0. */
public final class Noop {
  private Noop() {}

  public static void main(String[] words) {
    Container.run((batch, outputs) -> outputs.doubles(), new Options("any", "f64"));
  }
}
