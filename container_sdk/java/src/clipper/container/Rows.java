package clipper.container;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * The rows of a PREDICT or REPLY: views of the payload. Absent parts are null.
 *
 * <p>offsets: for rows of different lengths, the start of each row and the end of the last, in
 * elements; else null.
 */
final class Rows {
  DType dtype = DType.ANY;
  int n;
  int rank;
  final int[] dims = new int[4];
  boolean variable;
  ByteBuffer data;
  int[] offsets;
  ByteBuffer sessions;
  ByteBuffer confidence;
  ByteBuffer status;
  int[] qualifierOffsets;
  ByteBuffer qualifiers;
  ByteBuffer text;

  /** Take type and shape from a header, and forget all parts. */
  void describe(Header header) {
    dtype = header.dtype;
    n = header.rows;
    rank = header.rank;
    System.arraycopy(header.dims, 0, dims, 0, dims.length);
    variable = header.has(Header.VARIABLE);
    offsets = null;
    sessions = null;
    confidence = null;
    status = null;
    qualifiers = null;
    text = null;
  }

  /** Return row `i` of a batch as a batch of one row, without a copy. */
  Rows row(int i) {
    Rows one = new Rows();
    one.dtype = dtype;
    one.n = 1;
    one.rank = rank;
    System.arraycopy(dims, 0, one.dims, 0, dims.length);
    one.variable = variable;
    int fixed = data.limit() / n;
    int start = variable ? offsets[i] * dtype.itemBytes : i * fixed;
    int size = variable ? offsets[i + 1] * dtype.itemBytes - start : fixed;
    one.data = Wire.slice(data, start, size);
    one.offsets = variable ? new int[] {0, size / dtype.itemBytes} : null;
    one.sessions = sessions == null ? null : Wire.slice(sessions, 8 * i, 8);
    return one;
  }

  /** Return bytes as a little-endian buffer. */
  static ByteBuffer littleEndian(ByteBuffer bytes) {
    return bytes.order(ByteOrder.LITTLE_ENDIAN);
  }
}
