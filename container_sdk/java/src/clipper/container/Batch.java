package clipper.container;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;

/**
 * The rows of a batch. Valid during the call that receives it only: copy what is needed longer.
 *
 * <p>A row that has another type than is read throws IllegalArgumentException.
 */
public final class Batch {
  private final Rows rows;
  private final int items;

  Batch(Rows rows) {
    this.rows = rows;
    int product = 1;
    for (int i = 0; i < rows.rank; i++) {
      product *= rows.dims[i];
    }
    items = product;
  }

  /** Return the number of rows. */
  public int size() {
    return rows.n;
  }

  /** Return the element type. */
  public DType dtype() {
    return rows.dtype;
  }

  /** Return the shape of one row; {0} if rows differ in length. */
  public int[] shape() {
    return Arrays.copyOf(rows.dims, rows.rank);
  }

  /** Return the index of the first element of row `i` in doubles(), floats() and so on. */
  public int start(int i) {
    return rows.variable ? rows.offsets[i] : i * items;
  }

  /** Return the number of elements of row `i`. */
  public int length(int i) {
    return rows.variable ? rows.offsets[i + 1] - rows.offsets[i] : items;
  }

  /** Return the bytes of all rows, little-endian, row after row. */
  public ByteBuffer bytes() {
    return Rows.littleEndian(rows.data.asReadOnlyBuffer());
  }

  /** Return the elements of all rows of type f64. */
  public DoubleBuffer doubles() {
    return checked(DType.F64).asDoubleBuffer();
  }

  /** Return the elements of all rows of type f32. */
  public FloatBuffer floats() {
    return checked(DType.F32).asFloatBuffer();
  }

  /** Return the elements of all rows of type i32. */
  public IntBuffer ints() {
    return checked(DType.I32).asIntBuffer();
  }

  /** Return the elements of all rows of type i64. */
  public LongBuffer longs() {
    return checked(DType.I64).asLongBuffer();
  }

  /** Return the text of row `i`. Throws: IllegalArgumentException unless it is UTF-8. */
  public String text(int i) {
    try {
      return StandardCharsets.UTF_8.newDecoder().decode(part(checked(DType.STR), i)).toString();
    } catch (CharacterCodingException error) {
      throw new IllegalArgumentException("row " + i + " is not UTF-8", error);
    }
  }

  /** Return the bytes of row `i` of type bytes. */
  public ByteBuffer bytes(int i) {
    return part(checked(DType.BYTES), i);
  }

  /** Return the session of row `i` (Options.sessions); 0 for none. */
  public long session(int i) {
    return rows.sessions == null ? 0 : rows.sessions.getLong(8 * i);
  }

  /** Return the bytes of row `i` of a fixed shape, little-endian. */
  ByteBuffer row(int i) {
    int size = items * rows.dtype.itemBytes;
    return bytes().slice(i * size, size);
  }

  private ByteBuffer part(ByteBuffer all, int i) {
    return all.slice(rows.offsets[i], length(i));
  }

  private ByteBuffer checked(DType dtype) {
    if (rows.dtype != dtype) {
      throw new IllegalArgumentException("the rows are " + rows.dtype + ", not " + dtype);
    }
    return bytes();
  }
}
