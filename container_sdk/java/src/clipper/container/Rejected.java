package clipper.container;

/** The server rejected this container. The text is its reason. */
public class Rejected extends Exception {
  private static final long serialVersionUID = 1L;

  /** Create the error with the server's reason. */
  public Rejected(String reason) {
    super(reason);
  }
}
