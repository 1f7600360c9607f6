package clipper.container;

import java.util.Locale;

/** Element type of rows; the number on the wire is its ordinal. */
public enum DType {
  ANY(0), BOOL(1), U8(1), I8(1), U16(2), I16(2), U32(4), I32(4), U64(8), I64(8), F16(2), F32(4),
  F64(8), STR(1), BYTES(1);

  private static final DType[] ALL = values();

  /** Bytes of one element. */
  public final int itemBytes;

  DType(int itemBytes) {
    this.itemBytes = itemBytes;
  }

  /** Return the type of a number. Throws: BadFrame. */
  static DType of(int number) {
    if (number >= ALL.length) {
      throw new BadFrame("unknown dtype " + number);
    }
    return ALL[number];
  }

  /** Return the type of a name such as "f64". Throws: IllegalArgumentException. */
  static DType named(String name) {
    return valueOf(name.toUpperCase(Locale.ROOT));
  }

  /** Return true for str and bytes. */
  boolean isText() {
    return this == STR || this == BYTES;
  }

  /** Return the name, as in "f64". */
  @Override
  public String toString() {
    return name().toLowerCase(Locale.ROOT);
  }
}
