package clipper.container;

/** Malformed bytes. The connection that delivered them must be closed. */
public class BadFrame extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /** Create the error with its reason. */
  public BadFrame(String reason) {
    super(reason);
  }
}
