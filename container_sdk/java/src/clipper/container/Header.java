package clipper.container;

import java.nio.ByteBuffer;
import java.util.zip.CRC32;

/** The fields of a 64-byte frame header (docs/wire.md). Reused: decode() overwrites all fields. */
final class Header {
  static final int BYTES = 64;
  static final int VARIABLE = 1;
  static final int CONFIDENCE = 2;
  static final int ROW_STATUS = 4;
  static final int COMPRESSED = 8;
  static final int CHECKED = 16;
  static final int SHARED = 32;
  static final int SESSIONS = 64;
  static final int QUALIFIERS = 128;
  static final int PARTIAL = 256;
  private static final int FLAGS_ALL = 511;
  private static final int MAGIC = 0x52504c43; // "CLPR"
  private static final int RANK_MAX = 4;

  Kind kind = Kind.HEARTBEAT;
  DType dtype = DType.ANY;
  int rank;
  int flags;
  int rows;
  long id;
  final int[] dims = new int[RANK_MAX]; // u32
  int payloadBytes;
  long timeUs;
  int payloadCrc;
  private final CRC32 crc = new CRC32();

  boolean has(int flag) {
    return (flags & flag) != 0;
  }

  /** Return a dimension as a number from 0. */
  long dim(int i) {
    return Integer.toUnsignedLong(dims[i]);
  }

  /** Encode 64 bytes at `at` of a little-endian buffer, including the CRC. */
  void encode(ByteBuffer to, int at) {
    to.putInt(at, MAGIC).put(at + 4, (byte) 2).put(at + 5, (byte) kind.ordinal());
    to.put(at + 6, (byte) dtype.ordinal()).put(at + 7, (byte) rank).putShort(at + 8, (short) flags);
    to.putShort(at + 10, (short) 0).putInt(at + 12, rows).putLong(at + 16, id);
    for (int i = 0; i < RANK_MAX; i++) {
      to.putInt(at + 24 + 4 * i, dims[i]);
    }
    to.putLong(at + 40, payloadBytes).putLong(at + 48, timeUs).putInt(at + 56, payloadCrc);
    to.putInt(at + 60, crcOf(to, at, 60));
  }

  /** Decode and check the 64 bytes at `at`. Throws: BadFrame, FrameTooLarge. */
  void decode(ByteBuffer from, int at, long payloadBytesMax) {
    if (from.getInt(at) != MAGIC) {
      throw new BadFrame("not a clipper frame (wrong magic)");
    }
    if (from.get(at + 4) != 2) {
      throw new BadFrame("the server uses wire version " + from.get(at + 4) + ", this container 2");
    }
    if (crcOf(from, at, 60) != from.getInt(at + 60)) {
      throw new BadFrame("header damaged (its CRC differs)");
    }
    kind = Kind.of(from.get(at + 5) & 0xff);
    rank = from.get(at + 7) & 0xff;
    flags = from.getShort(at + 8) & 0xffff;
    rows = from.getInt(at + 12);
    id = from.getLong(at + 16);
    for (int i = 0; i < RANK_MAX; i++) {
      dims[i] = from.getInt(at + 24 + 4 * i);
    }
    timeUs = from.getLong(at + 48);
    payloadCrc = from.getInt(at + 56);
    if (from.getShort(at + 10) != 0 || (flags & ~FLAGS_ALL) != 0) {
      throw new BadFrame("reserved bits are set");
    }
    if (payloadCrc != 0 && !has(CHECKED)) {
      throw new BadFrame("a payload CRC without CHECKED");
    }
    dtype = DType.of(from.get(at + 6) & 0xff);
    long size = from.getLong(at + 40);
    if (kind == Kind.PREDICT || kind == Kind.REPLY) {
      checkRows();
    } else {
      checkControl(size);
    }
    if (Long.compareUnsigned(size, Math.min(payloadBytesMax, Wire.PAYLOAD_BYTES_CAP)) > 0) {
      throw new FrameTooLarge("a payload", size, payloadBytesMax);
    }
    payloadBytes = (int) size;
  }

  /** Check the CRC of a CHECKED payload at `at`. Throws: BadFrame. */
  void checkPayload(ByteBuffer from, int at) {
    if (has(CHECKED) && crcOf(from, at, payloadBytes) != payloadCrc) {
      throw new BadFrame("payload damaged (its CRC differs)");
    }
  }

  int crcOf(ByteBuffer from, int at, int size) {
    int position = from.position();
    int limit = from.limit();
    from.limit(at + size).position(at);
    crc.reset();
    crc.update(from);
    from.limit(limit).position(position);
    return (int) crc.getValue();
  }

  private void checkControl(long size) {
    boolean empty = dtype == DType.ANY && rank == 0 && rows == 0 && (flags & ~CHECKED) == 0;
    if (!empty || (dims[0] | dims[1] | dims[2] | dims[3]) != 0) {
      throw new BadFrame(kind + " carries no rows");
    }
    boolean fits = switch (kind) {
      case HEARTBEAT, GOODBYE -> size == 0;
      case ACCURACY -> size == 16 || size == 24;
      case REGION -> size == 24;
      default -> true;
    };
    if (!fits) {
      throw new BadFrame(kind + " of " + size + " bytes");
    }
  }

  private void checkRows() {
    if (dtype == DType.ANY) {
      throw new BadFrame("unknown dtype 0");
    }
    if (rank > RANK_MAX) {
      throw new BadFrame("wrong rank or dims");
    }
    for (int i = rank; i < RANK_MAX; i++) {
      if (dims[i] != 0) {
        throw new BadFrame("wrong rank or dims");
      }
    }
    if (has(VARIABLE) ? rank != 1 || dims[0] != 0 : dtype.isText()) {
      throw new BadFrame("rows that differ in length, and only these, have rank 1 and dims 0");
    }
    if (has(COMPRESSED) && (dtype != DType.STR || kind != Kind.PREDICT)) {
      throw new BadFrame("only the str rows of a PREDICT may be COMPRESSED");
    }
    if (has(SHARED) && (kind != Kind.PREDICT || (flags & ~(SHARED | CHECKED)) != 0)) {
      throw new BadFrame("only the rows of one shape of a PREDICT may be SHARED, and nothing else");
    }
    if (has(SESSIONS) && kind != Kind.PREDICT || has(QUALIFIERS) && kind != Kind.REPLY) {
      throw new BadFrame("a PREDICT has no qualifiers, and a REPLY no sessions");
    }
    if (has(PARTIAL) && kind != Kind.REPLY) {
      throw new BadFrame("only a REPLY may be PARTIAL");
    }
    if (rows == 0) {
      throw new BadFrame("a batch has at least one row");
    }
    if (Integer.toUnsignedLong(rows) > Wire.ROWS_MAX) {
      throw new FrameTooLarge("rows", Integer.toUnsignedLong(rows), Wire.ROWS_MAX);
    }
  }
}
