package clipper.container;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;

/**
 * Payloads of the wire protocol (docs/wire.md). Pure functions on bytes; no sockets.
 *
 * <p>Every length is compared with the bytes present and with a limit before memory is reserved for
 * it. Malformed bytes throw BadFrame.
 */
final class Wire {
  static final int PAYLOAD_BYTES_MAX = 64 << 20;
  static final int PAYLOAD_BYTES_CAP = 1 << 30; // a buffer of Java has at most 2^31 bytes
  static final int ROWS_MAX = 1 << 20;
  static final int CONTROL_BYTES_MAX = 1 << 16; // payload of HELLO, WELCOME and REFUSE
  static final int QUALIFIERS_MAX = 1024; // bytes of qualifiers per row of a REPLY
  static final int V1_HEAD_BYTES = 9;
  private static final DType[] V1_TYPES = {
    DType.ANY, DType.I32, DType.F64, DType.U8, DType.I32, DType.F64, DType.U8, DType.STR
  };

  private Wire() {}

  /** Return a size rounded up to a multiple of 8. */
  static int padded(int size) {
    return (size + 7) & ~7;
  }

  /** Reads the parts of a payload in order. */
  private static final class Parts {
    private final ByteBuffer payload;
    private final int end;
    private int at;

    Parts(ByteBuffer payload, int at, int size) {
      this.payload = payload;
      this.at = at;
      this.end = at + size;
    }

    int left() {
      return end - at;
    }

    ByteBuffer take(long size) {
      long whole = (size + 7) & ~7L;
      if (size > left() || whole > left()) {
        throw new BadFrame("the payload is shorter than its rows");
      }
      for (int i = at + (int) size; i < at + (int) whole; i++) {
        if (payload.get(i) != 0) {
          throw new BadFrame("padding is not zero");
        }
      }
      ByteBuffer part = slice(payload, at, (int) size);
      at += (int) whole;
      return part;
    }

    ByteBuffer rest() {
      ByteBuffer part = slice(payload, at, left());
      at = end;
      return part;
    }
  }

  static ByteBuffer slice(ByteBuffer bytes, int at, int size) {
    return Rows.littleEndian(bytes.slice(at, size));
  }

  /** Decode the payload of a PREDICT or REPLY at `at` into `rows`. Throws: BadFrame. */
  static void openRows(Header header, ByteBuffer payload, int at, Rows rows, long payloadBytesMax) {
    if (header.has(Header.SHARED)) {
      throw new BadFrame("SHARED rows, but WELCOME did not enable shared memory");
    }
    header.checkPayload(payload, at);
    Parts parts = new Parts(payload, at, header.payloadBytes);
    rows.describe(header);
    if (rows.variable) {
      openVariable(header, parts, rows, payloadBytesMax);
    } else {
      rows.data = parts.take(bytesOf(header));
    }
    if (rows.dtype == DType.BOOL) {
      checkBits(rows.data, "a bool is 0 or 1");
    }
    int n = rows.n;
    if (header.has(Header.SESSIONS)) {
      rows.sessions = parts.take(8L * n);
    }
    if (header.has(Header.CONFIDENCE)) {
      rows.confidence = parts.take(4L * n);
    }
    if (header.has(Header.QUALIFIERS)) {
      ByteBuffer lengths = parts.take(4L * n);
      for (int i = 0; i < n; i++) {
        long size = Integer.toUnsignedLong(lengths.getInt(4 * i));
        if (size > QUALIFIERS_MAX) {
          throw new FrameTooLarge("qualifiers", size, QUALIFIERS_MAX);
        }
      }
      rows.qualifierOffsets = offsets(lengths, n, parts.left());
      rows.qualifiers = parts.take(rows.qualifierOffsets[n]);
    }
    if (header.has(Header.ROW_STATUS)) {
      rows.status = parts.take(n);
      checkBits(rows.status, "a row's status is 0 or 1");
      rows.text = parts.rest();
    }
    if (parts.left() != 0) {
      throw new BadFrame("the payload is longer than its rows");
    }
  }

  private static void openVariable(Header header, Parts parts, Rows rows, long payloadBytesMax) {
    ByteBuffer lengths = parts.take(4L * rows.n);
    boolean compressed = header.has(Header.COMPRESSED);
    long most = compressed ? Math.min(payloadBytesMax, PAYLOAD_BYTES_CAP) : parts.left();
    rows.offsets = offsets(lengths, rows.n, most);
    long size = (long) rows.offsets[rows.n] * rows.dtype.itemBytes;
    if (!compressed) {
      rows.data = parts.take(size);
      return;
    }
    if (parts.left() < 8) {
      throw new BadFrame("the payload is shorter than its rows");
    }
    long blockBytes = parts.payload.getLong(parts.at);
    if (blockBytes < 0 || blockBytes > parts.left() - 8) {
      throw new BadFrame("the payload is shorter than its rows");
    }
    ByteBuffer block = parts.take(8 + blockBytes);
    rows.data = Lz4Block.decode(slice(block, 8, (int) blockBytes), (int) size);
  }

  /** Return the start of each row and the end of the last. Throws: BadFrame beyond `most`. */
  private static int[] offsets(ByteBuffer lengths, int n, long most) {
    int[] offsets = new int[n + 1];
    long end = 0;
    for (int i = 0; i < n; i++) {
      end += Integer.toUnsignedLong(lengths.getInt(4 * i));
      if (end > most) {
        throw new FrameTooLarge("rows of elements", end, most);
      }
      offsets[i + 1] = (int) end;
    }
    return offsets;
  }

  private static void checkBits(ByteBuffer bytes, String otherwise) {
    for (int i = 0; i < bytes.limit(); i++) {
      if ((bytes.get(i) & 0xfe) != 0) {
        throw new BadFrame(otherwise);
      }
    }
  }

  /** Return the bytes of all rows of a fixed shape. Throws: BadFrame beyond 2^63. */
  static long bytesOf(Header header) {
    long size = (long) header.rows * header.dtype.itemBytes;
    boolean empty = false;
    for (int i = 0; i < header.rank; i++) {
      if (header.dims[i] == 0) {
        empty = true;
      } else if (Math.multiplyHigh(size, header.dim(i)) != 0 || size * header.dim(i) < 0) {
        throw new BadFrame("rows of more than 2^63 bytes");
      } else {
        size *= header.dim(i);
      }
    }
    return empty ? 0 : size;
  }

  /** Decode the runs of a SHARED batch as {region, first row, rows} each. Throws: BadFrame. */
  static long[][] openRuns(Header header, ByteBuffer payload, int at) {
    header.checkPayload(payload, at);
    int size = header.payloadBytes;
    if (size == 0 || size % 16 != 0) {
      throw new BadFrame(size + " bytes are not a multiple of a run's 16");
    }
    long[][] runs = new long[size / 16][];
    long total = 0;
    for (int i = 0; i < runs.length; i++) {
      int from = at + 16 * i;
      long count = Integer.toUnsignedLong(payload.getInt(from + 4));
      long region = Integer.toUnsignedLong(payload.getInt(from));
      runs[i] = new long[] {region, payload.getLong(from + 8), count};
      total += count;
      if (count == 0) {
        throw new BadFrame("a run of no rows");
      }
    }
    if (total != header.rows) {
      throw new BadFrame("the runs do not add up to " + header.rows + " rows");
    }
    return runs;
  }

  /** Decode a REGION as {number, rows, bytes per row}. Throws: BadFrame. */
  static long[] openRegion(Header header, ByteBuffer payload, int at) {
    header.checkPayload(payload, at);
    long[] region = {payload.getLong(at), payload.getLong(at + 8), payload.getLong(at + 16)};
    if (region[0] >>> 32 != 0 || region[1] == 0 || region[2] == 0) {
      throw new BadFrame("a region without a number, or without rows");
    }
    return region;
  }

  /** Decode an ACCURACY as {rows learned, rows failed, accuracy or NaN}. Throws: BadFrame. */
  static double openAccuracy(Header header, ByteBuffer payload, int at) {
    header.checkPayload(payload, at);
    if (header.payloadBytes == 16) {
      return Double.NaN;
    }
    double accuracy = payload.getDouble(at + 16);
    if (!(accuracy >= 0 && accuracy <= 1)) {
      throw new BadFrame("an accuracy of " + accuracy);
    }
    return accuracy;
  }

  /** Decode a FEEDBACK into its inputs and labels. Throws: BadFrame. */
  static Rows[] openFeedback(Header outer, ByteBuffer payload, int at, long payloadBytesMax) {
    outer.checkPayload(payload, at);
    Rows[] both = {new Rows(), new Rows()};
    Kind[] kinds = {Kind.PREDICT, Kind.REPLY};
    Header header = new Header();
    int end = at + outer.payloadBytes;
    for (int i = 0; i < 2; i++) {
      if (end - at < Header.BYTES) {
        throw new BadFrame("feedback is a PREDICT and a REPLY frame");
      }
      header.decode(payload, at, payloadBytesMax);
      at += Header.BYTES;
      if (header.kind != kinds[i] || header.payloadBytes > end - at) {
        throw new BadFrame("feedback is a PREDICT and a REPLY frame, not " + header.kind);
      }
      openRows(header, payload, at, both[i], payloadBytesMax);
      at += header.payloadBytes;
    }
    if (at != end || both[0].n != both[1].n || both[0].sessions == null) {
      throw new BadFrame("feedback has as many labels and sessions as inputs, and nothing else");
    }
    return both;
  }

  /** Encode a frame without rows. */
  static ByteBuffer controlFrame(Kind kind, byte[] payload, long id, boolean checked) {
    ByteBuffer frame = Rows.littleEndian(ByteBuffer.allocate(Header.BYTES + payload.length));
    frame.put(Header.BYTES, payload);
    Header header = new Header();
    header.kind = kind;
    header.id = id;
    header.payloadBytes = payload.length;
    if (checked) {
      header.flags = Header.CHECKED;
      header.payloadCrc = header.crcOf(frame, Header.BYTES, payload.length);
    }
    header.encode(frame, 0);
    return frame;
  }

  /** Encode a frame whose payload is text. */
  static ByteBuffer textFrame(Kind kind, String text, long id, boolean checked) {
    return controlFrame(kind, text.getBytes(StandardCharsets.UTF_8), id, checked);
  }

  // -- version 1

  /** Return how many bytes follow the first 9 of a version 1 batch. Throws: BadFrame. */
  static int v1ContentBytes(ByteBuffer head, int at, long payloadBytesMax) {
    int kind = head.get(at) & 0xff;
    long n = Integer.toUnsignedLong(head.getInt(at + 1));
    long length = Integer.toUnsignedLong(head.getInt(at + 5));
    if (kind == 0 || kind > 7) {
      throw new BadFrame("unknown format " + kind + " of a version 1 batch");
    }
    if (n == 0) {
      throw new BadFrame("a batch has at least one row");
    }
    if (n > ROWS_MAX) {
      throw new FrameTooLarge("rows", n, ROWS_MAX);
    }
    long size = kind <= 3 ? n * length * V1_TYPES[kind].itemBytes : length;
    if (size > Math.min(payloadBytesMax, PAYLOAD_BYTES_CAP)) {
      throw new FrameTooLarge("a payload", size, payloadBytesMax);
    }
    return (int) size;
  }

  /** Decode a version 1 batch, whose first 9 bytes are at `at`. Throws: BadFrame. */
  static void openV1(ByteBuffer batch, int at, int size, Rows rows, long payloadBytesMax) {
    int kind = batch.get(at);
    Header header = new Header();
    header.dtype = V1_TYPES[kind];
    header.rows = batch.getInt(at + 1);
    header.rank = 1;
    header.flags = kind > 3 ? Header.VARIABLE : 0;
    header.dims[0] = kind > 3 ? 0 : batch.getInt(at + 5);
    rows.describe(header);
    ByteBuffer content = slice(batch, at + V1_HEAD_BYTES, size);
    if (kind <= 3) {
      rows.data = content;
      return;
    }
    if (4L * rows.n > size) {
      throw new BadFrame("the content is shorter than its rows");
    }
    if (kind < 7) {
      openV1Variable(content, rows);
      return;
    }
    for (int i = 0; i < rows.n; i++) {
      if (content.getInt(4 * i) < 0) {
        throw new BadFrame("a negative length");
      }
    }
    rows.offsets = offsets(content, rows.n, Math.min(payloadBytesMax, PAYLOAD_BYTES_CAP));
    ByteBuffer block = slice(content, 4 * rows.n, size - 4 * rows.n);
    rows.data = Lz4Block.decode(block, rows.offsets[rows.n]);
  }

  private static void openV1Variable(ByteBuffer content, Rows rows) {
    int item = rows.dtype.itemBytes;
    int size = content.limit();
    rows.offsets = new int[rows.n + 1];
    rows.data = Rows.littleEndian(ByteBuffer.allocate(size));
    int at = 0;
    int to = 0;
    for (int i = 0; i < rows.n; i++) {
      long length = size - at < 4 ? -1 : Integer.toUnsignedLong(content.getInt(at));
      at += 4;
      if (length < 0 || length * item > size - at) {
        throw new BadFrame("the content is shorter than its rows");
      }
      int bytes = (int) length * item;
      rows.data.put(to, content, at, bytes);
      at += bytes;
      to += bytes;
      rows.offsets[i + 1] = rows.offsets[i] + (int) length;
    }
    if (at != size) {
      throw new BadFrame("the content is longer than its rows");
    }
    rows.data.limit(to);
  }
}
