package clipper.container;

/** Kind of a frame; the number on the wire is its ordinal. */
public enum Kind {
  NONE, HELLO, WELCOME, REFUSE, PREDICT, REPLY, FAILURE, HEARTBEAT, GOODBYE, REGION, FEEDBACK,
  ACCURACY;

  private static final Kind[] ALL = values();

  /** Return the kind of a number. Throws: BadFrame. */
  static Kind of(int number) {
    if (number == 0 || number >= ALL.length) {
      throw new BadFrame("unknown kind " + number);
    }
    return ALL[number];
  }
}
