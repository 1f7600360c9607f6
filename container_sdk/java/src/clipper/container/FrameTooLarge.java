package clipper.container;

/** A frame exceeds a limit. */
public class FrameTooLarge extends BadFrame {
  private static final long serialVersionUID = 1L;

  /** Create the error for a size and its limit. */
  public FrameTooLarge(String what, long size, long limit) {
    super(what + " of " + size + "; the limit is " + limit);
  }
}
