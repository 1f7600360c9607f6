package clipper.container;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;

/**
 * The outputs of a batch: one of doubles(), floats(), ints(), longs(), values(), or add() for each
 * row; and whatever else is known.
 */
public final class Outputs {
  private static final int TEXT_BYTES_MAX = 16 << 10;
  private static final int BESIDE_BYTES = 13; // of a row: a length, a confidence, a status
  private static final int PADDING_MAX = 64; // of all parts of a payload

  /** What a model returned for one row alone. failure: why it failed; then the rest is null. */
  record Single(
      DType dtype,
      int[] shape,
      boolean variable,
      byte[] data,
      float[] confidence,
      byte[][] qualifiers,
      String failure) {
    static Single failed(String why) {
      return new Single(null, null, false, null, null, null, why);
    }
  }

  private final Header header = new Header();
  private int n;
  private DType dtype = DType.ANY;
  private int[] shape = {};
  private boolean variable;
  private ByteBuffer data = direct(1 << 12); // HEADER_BYTES of room, then the data
  private int dataBytes;
  private int[] lengths = {};
  private int added;
  private float[] confidence;
  private byte[] status;
  private byte[][] qualifiers;
  private StringBuilder text;
  private ByteBuffer frame = direct(1 << 12);

  private static ByteBuffer direct(int size) {
    return Rows.littleEndian(ByteBuffer.allocateDirect(size));
  }

  /** Start anew for a batch of `n` rows. */
  void reset(int n) {
    this.n = n;
    dtype = DType.ANY;
    shape = new int[0];
    variable = false;
    dataBytes = 0;
    added = 0;
    confidence = null;
    status = null;
    qualifiers = null;
    text = null;
  }

  /**
   * Have one output of `shape` per row, all zeros; a scalar without a shape. Return its bytes,
   * little-endian, for the caller to fill in; valid until the next call.
   */
  public ByteBuffer values(DType dtype, int... shape) {
    if (dtype.isText() || dtype == DType.ANY || shape.length > 4) {
      throw new InvalidOutput("outputs are numbers of at most 4 dimensions, or are added one by one");
    }
    long size = (long) n * dtype.itemBytes;
    for (int dim : shape) {
      size = dim < 0 || size > Wire.PAYLOAD_BYTES_CAP ? -1 : size * dim;
      if (size < 0) {
        break;
      }
    }
    if (size < 0 || size > Wire.PAYLOAD_BYTES_CAP) {
      throw new InvalidOutput("outputs of more than " + Wire.PAYLOAD_BYTES_CAP + " bytes");
    }
    this.dtype = dtype;
    this.shape = shape;
    variable = false;
    dataBytes = (int) size;
    reserve(dataBytes, 0);
    int at = 0;
    for (; at + 8 <= dataBytes; at += 8) {
      data.putLong(at, 0);
    }
    for (; at < dataBytes; at++) {
      data.put(at, (byte) 0);
    }
    return Wire.slice(data, 0, dataBytes);
  }

  /** Have f64 outputs; see values(). */
  public DoubleBuffer doubles(int... shape) {
    return values(DType.F64, shape).asDoubleBuffer();
  }

  /** Have f32 outputs; see values(). */
  public FloatBuffer floats(int... shape) {
    return values(DType.F32, shape).asFloatBuffer();
  }

  /** Have i32 outputs; see values(). */
  public IntBuffer ints(int... shape) {
    return values(DType.I32, shape).asIntBuffer();
  }

  /** Have i64 outputs; see values(). */
  public LongBuffer longs(int... shape) {
    return values(DType.I64, shape).asLongBuffer();
  }

  /** Add the output of the next row, a text. */
  public void add(String text) {
    append(DType.STR, utf8(text), 1);
  }

  /** Return a text as UTF-8. Throws: InvalidOutput for half of a surrogate pair. */
  static ByteBuffer utf8(String text) {
    try {
      return StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text));
    } catch (CharacterCodingException error) {
      throw new InvalidOutput("a text that is not valid Unicode: half of a surrogate pair");
    }
  }

  /** Add the output of the next row, bytes. */
  public void add(byte[] bytes) {
    append(DType.BYTES, ByteBuffer.wrap(bytes), 1);
  }

  /** Add the output of the next row, f64; rows may differ in length. */
  public void add(double[] values) {
    ByteBuffer bytes = Rows.littleEndian(ByteBuffer.allocate(8 * values.length));
    bytes.asDoubleBuffer().put(values);
    append(DType.F64, bytes, 8);
  }

  /** Add the output of the next row, f32; rows may differ in length. */
  public void add(float[] values) {
    ByteBuffer bytes = Rows.littleEndian(ByteBuffer.allocate(4 * values.length));
    bytes.asFloatBuffer().put(values);
    append(DType.F32, bytes, 4);
  }

  /** Set the output of row `row`, bytes of the same size for each row. */
  void putFixed(int row, byte[] bytes) {
    if (dtype != DType.U8 || shape.length != 1 || shape[0] != bytes.length) {
      values(DType.U8, bytes.length);
    }
    data.put(row * bytes.length, bytes);
  }

  /** Return the confidence of each row, from 0 to 1, for the caller to fill in. */
  public float[] confidence() {
    confidence = confidence == null ? new float[n] : confidence;
    return confidence;
  }

  /** Mark a row as failed; its output is ignored. */
  public void fail(int row, String reason) {
    if (row < 0 || row >= n) {
      throw new InvalidOutput("row " + row + " of " + n);
    }
    status = status == null ? new byte[n] : status;
    text = text == null ? new StringBuilder() : text;
    status[row] = 1;
    if (text.length() < TEXT_BYTES_MAX) {
      text.append(text.isEmpty() ? "" : "\n").append("row ").append(row).append(": ");
      text.append(reason, 0, Math.min(reason.length(), TEXT_BYTES_MAX));
    }
  }

  /** Set what a decider may use beside the output of a row: a msgpack map of at most 1024 bytes. */
  public void qualify(int row, byte[] map) {
    if (row < 0 || row >= n || map.length > Wire.QUALIFIERS_MAX) {
      throw new InvalidOutput("qualifiers above the limit");
    }
    qualifiers = qualifiers == null ? new byte[n][] : qualifiers;
    qualifiers[row] = map;
  }

  /** Return a copy of the outputs of a batch of one row. Throws: InvalidOutput. */
  Single single() {
    if (status != null) {
      return Single.failed(text.substring("row 0: ".length()));
    }
    checkCount();
    byte[] copy = new byte[dataBytes];
    data.get(0, copy);
    return new Single(dtype, shape, variable, copy, confidence, qualifiers, null);
  }

  /**
   * Have the outputs of single rows, in order; those that failed are empty or zeros. Throws:
   * InvalidOutput if their types or shapes differ (one dimension may have any length);
   * AllRowsFailed.
   */
  void join(List<Single> rows) {
    Single first = null;
    boolean varies = false;
    for (Single one : rows) {
      if (one.failure == null) {
        first = first == null ? one : first;
        varies |= one.variable || !Arrays.equals(one.shape, first.shape);
      }
    }
    if (first == null) {
      throw new AllRowsFailed("row 0: " + rows.get(0).failure);
    }
    reset(rows.size());
    if (!varies) {
      values(first.dtype, first.shape);
    }
    for (int i = 0; i < n; i++) {
      Single one = rows.get(i);
      boolean good = one.failure == null;
      if (good && (one.dtype != first.dtype || varies && !one.variable && one.shape.length != 1)) {
        throw new InvalidOutput("the outputs of the rows of a batch differ in type or shape");
      }
      if (varies) {
        ByteBuffer bytes = ByteBuffer.wrap(good ? one.data : new byte[0]);
        append(first.dtype, bytes, first.dtype.itemBytes);
      } else if (good) {
        data.put(i * one.data.length, one.data);
      }
      if (!good) {
        fail(i, one.failure);
      } else if (one.confidence != null) {
        confidence()[i] = one.confidence[0];
      }
      if (good && one.qualifiers != null) {
        qualify(i, one.qualifiers[0]);
      }
    }
  }

  private void checkCount() {
    if (dtype == DType.ANY || variable && added != n) {
      throw new InvalidOutput("the model returned " + added + " outputs for " + n + " rows");
    }
  }

  /** Return the type of one output, as HELLO names it. */
  String type() {
    if (dtype.isText() || shape.length == 0 && !variable) {
      return dtype.toString();
    }
    return dtype + (variable ? "[*]" : Arrays.toString(shape).replace(" ", ""));
  }

  private void append(DType dtype, ByteBuffer bytes, int item) {
    if (added == 0) {
      this.dtype = dtype;
      variable = true;
      dataBytes = 0;
    }
    long size = (long) dataBytes + bytes.limit();
    if (this.dtype != dtype || size > Wire.PAYLOAD_BYTES_CAP) {
      throw new InvalidOutput("all outputs of a batch have one type, and at most 2^30 bytes");
    }
    if (added == lengths.length) {
      lengths = Arrays.copyOf(lengths, Math.max(64, 2 * added));
    }
    lengths[added++] = bytes.limit() / item;
    reserve((int) size, dataBytes);
    data.put(dataBytes, bytes, 0, bytes.limit());
    dataBytes = (int) size;
  }

  private void reserve(int size, int keep) {
    if (size > data.capacity()) {
      ByteBuffer more = direct((int) Math.min(2L * size, Integer.MAX_VALUE - 64));
      more.put(0, data, 0, keep);
      data = more;
    }
  }

  /** Return a REPLY; valid until the next batch. Throws: InvalidOutput. */
  ByteBuffer encode(long id, long timeUs, boolean checked, boolean qualified, long payloadBytesMax) {
    checkCount();
    return encodePart(0, n, 0, id, timeUs, checked, qualified, payloadBytesMax);
  }

  /** Takes a frame, which is valid until it returns. */
  interface Sender {
    void send(ByteBuffer frame) throws IOException;
  }

  /** Check the outputs before sendParts(). Throws: InvalidOutput if one output alone is too large. */
  void checkParts(boolean qualified, long payloadBytesMax) {
    checkCount();
    for (int start = 0; start < n; ) {
      int end = fitting(start, qualified, payloadBytesMax);
      long size = sizeOf(start, end, qualified);
      if (size > payloadBytesMax || size > Wire.PAYLOAD_BYTES_CAP) {
        throw tooLarge(size, payloadBytesMax);
      }
      start = end;
    }
  }

  /**
   * Pass the outputs to `sender` as one REPLY, or as several if they are too large for one frame.
   */
  void sendParts(
      long id, long timeUs, boolean checked, boolean qualified, long payloadBytesMax, Sender sender)
      throws IOException {
    long at = 0;
    for (int start = 0; start < n; ) {
      int end = fitting(start, qualified, payloadBytesMax);
      sender.send(encodePart(start, end, at, id, timeUs, checked, qualified, payloadBytesMax));
      at += bytesOf(start, end);
      start = end;
    }
  }

  /** Return the end of the rows from `start` on that fit into one frame; of one row at least. */
  private int fitting(int start, boolean qualified, long payloadBytesMax) {
    long most = Math.min(payloadBytesMax, Wire.PAYLOAD_BYTES_CAP);
    int textBytes = text == null ? 0 : text.toString().getBytes(StandardCharsets.UTF_8).length;
    long size = PADDING_MAX + textBytes;
    int end = start;
    for (; end < n; end++) {
      size += bytesOf(end, end + 1) + BESIDE_BYTES;
      if (qualified && qualifiers != null && qualifiers[end] != null) {
        size += qualifiers[end].length;
      }
      if (size > most && end > start) {
        break;
      }
    }
    return end;
  }

  private long bytesOf(int start, int end) {
    if (!variable) {
      return (long) (dataBytes / n) * (end - start);
    }
    long items = 0;
    for (int i = start; i < end; i++) {
      items += lengths[i];
    }
    return items * dtype.itemBytes;
  }

  private long sizeOf(int start, int end, boolean qualified) {
    int rows = end - start;
    boolean qualifying = qualified && qualifiers != null;
    int textBytes = text == null ? 0 : text.toString().getBytes(StandardCharsets.UTF_8).length;
    long size = Wire.padded((int) bytesOf(start, end)) + (variable ? Wire.padded(4 * rows) : 0L);
    size += confidence == null ? 0 : Wire.padded(4 * rows);
    size +=
        qualifying ? Wire.padded(4 * rows) + Wire.padded(qualifierBytes(start, end)) : 0;
    return size + (status == null ? 0 : Wire.padded(rows) + textBytes);
  }

  private static InvalidOutput tooLarge(long size, long payloadBytesMax) {
    return new InvalidOutput(
        "the outputs have " + size + " bytes; the server's limit is " + payloadBytesMax
            + ". Return less, or lower batching.size_max.");
  }

  private ByteBuffer encodePart(
      int start, int end, long at, long id, long timeUs, boolean checked, boolean qualified,
      long payloadBytesMax) {
    byte[] why = text == null ? new byte[0] : text.toString().getBytes(StandardCharsets.UTF_8);
    long size = sizeOf(start, end, qualified);
    if (size > payloadBytesMax || size > Wire.PAYLOAD_BYTES_CAP) {
      throw tooLarge(size, payloadBytesMax);
    }
    if (Header.BYTES + size > frame.capacity()) {
      frame = direct((int) Math.min(2 * (Header.BYTES + size), Integer.MAX_VALUE - 64));
    }
    frame.clear().position(Header.BYTES);
    header.flags = end < n ? Header.PARTIAL : 0;
    if (variable) {
      header.flags |= Header.VARIABLE;
      for (int i = start; i < end; i++) {
        frame.putInt(lengths[i]);
      }
      pad();
    }
    int bytes = (int) bytesOf(start, end);
    int after = frame.position() + bytes;
    frame.put(frame.position(), data, (int) at, bytes);
    for (int i = frame.position(); dtype == DType.BOOL && i < after; i++) {
      frame.put(i, (byte) (frame.get(i) != 0 ? 1 : 0)); // of a mask of 0 and 255, for instance
    }
    frame.position(after);
    pad();
    if (confidence != null) {
      header.flags |= Header.CONFIDENCE;
      for (int i = start; i < end; i++) {
        frame.putFloat(confidence[i]);
      }
      pad();
    }
    if (qualified && qualifiers != null) {
      putQualifiers(start, end);
    }
    if (status != null) {
      header.flags |= Header.ROW_STATUS;
      frame.put(status, start, end - start);
      pad();
      frame.put(why);
    }
    describe(id, timeUs, end - start, (int) size, checked);
    return frame.flip();
  }

  private void describe(long id, long timeUs, int rows, int size, boolean checked) {
    header.kind = Kind.REPLY;
    header.dtype = dtype;
    header.rank = variable ? 1 : shape.length;
    Arrays.fill(header.dims, 0);
    if (!variable) {
      System.arraycopy(shape, 0, header.dims, 0, shape.length);
    }
    header.rows = rows;
    header.id = id;
    header.timeUs = timeUs;
    header.payloadBytes = size;
    header.payloadCrc = 0;
    if (checked) {
      header.flags |= Header.CHECKED;
      header.payloadCrc = header.crcOf(frame, Header.BYTES, size);
    }
    header.encode(frame, 0);
  }

  private void putQualifiers(int start, int end) {
    header.flags |= Header.QUALIFIERS;
    for (int i = start; i < end; i++) {
      frame.putInt(qualifiers[i] == null ? 0 : qualifiers[i].length);
    }
    pad();
    for (int i = start; i < end; i++) {
      if (qualifiers[i] != null) {
        frame.put(qualifiers[i]);
      }
    }
    pad();
  }

  private int qualifierBytes(int start, int end) {
    int size = 0;
    for (int i = start; i < end; i++) {
      size += qualifiers[i] == null ? 0 : qualifiers[i].length;
    }
    return size;
  }

  private void pad() {
    while ((frame.position() & 7) != 0) {
      frame.put((byte) 0);
    }
  }

  /** Return the outputs as n f64, for protocol version 1. Throws: InvalidOutput. */
  ByteBuffer numbers() {
    if (variable || status != null || dataBytes != n * dtype.itemBytes || dtype == DType.ANY) {
      throw new InvalidOutput("version 1 takes one number per row");
    }
    ByteBuffer to = Rows.littleEndian(ByteBuffer.allocate(8 * n));
    for (int i = 0; i < n; i++) {
      to.putDouble(8 * i, number(i));
    }
    return to;
  }

  private double number(int i) {
    return switch (dtype) {
      case BOOL, U8 -> data.get(i) & 0xff;
      case I8 -> data.get(i);
      case U16 -> data.getShort(2 * i) & 0xffff;
      case I16 -> data.getShort(2 * i);
      case U32 -> Integer.toUnsignedLong(data.getInt(4 * i));
      case I32 -> data.getInt(4 * i);
      case U64, I64 -> data.getLong(8 * i);
      case F32 -> data.getFloat(4 * i);
      case F64 -> data.getDouble(8 * i);
      default -> throw new InvalidOutput("version 1 takes numbers of 8, 16, 32 or 64 bits");
    };
  }
}
