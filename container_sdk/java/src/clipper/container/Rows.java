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

  /** Return bytes as a little-endian buffer. */
  static ByteBuffer littleEndian(ByteBuffer bytes) {
    return bytes.order(ByteOrder.LITTLE_ENDIAN);
  }
}
