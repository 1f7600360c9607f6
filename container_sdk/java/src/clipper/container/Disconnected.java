package clipper.container;

import java.io.IOException;

/** The connection ended, or the server was silent for too long. */
public class Disconnected extends IOException {
  private static final long serialVersionUID = 1L;

  /** Create the error with its reason. */
  public Disconnected(String reason) {
    super(reason);
  }
}
