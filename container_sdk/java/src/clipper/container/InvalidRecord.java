package clipper.container;

/** A record that is damaged, or does not fit its schema. The text names the tensor. */
public class InvalidRecord extends IllegalArgumentException {
  private static final long serialVersionUID = 1L;

  /** Create the error with its reason. */
  public InvalidRecord(String reason) {
    super(reason);
  }

  /** Create the error for a tensor. */
  InvalidRecord(TensorSpec spec, String reason) {
    super("tensor '" + spec.name() + "': " + reason);
  }
}
