package clipper.container;

import java.io.File;
import java.io.IOException;

/** Connects to an address that accepts nobody, again and again; prints its file descriptors. */
final class Refused {
  private static final int TIMES = 50;

  private Refused() {}

  public static void main(String[] words) {
    for (int i = 0; i <= TIMES; i++) {
      try {
        new Connection(words[0]).close();
        throw new IllegalStateException("it is connected");
      } catch (IOException expected) {
        if (i == 0 || i == TIMES) {
          System.out.println(new File("/proc/self/fd").list().length);
        }
      }
    }
  }
}
