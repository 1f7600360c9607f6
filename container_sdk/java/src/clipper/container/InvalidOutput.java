package clipper.container;

/** The model returned something that cannot be sent. The batch fails with this text. */
public class InvalidOutput extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /** Create the error with its reason. */
  public InvalidOutput(String reason) {
    super(reason);
  }
}
