package clipper.container;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.List;

/**
 * Writes the named tensors of one row. A tensor that is not given is of zeros, or empty texts, and
 * its free sizes are 0.
 */
public final class RecordWriter {
  private final Schema schema;
  private final int[][] shapes;
  private final ByteBuffer[] parts;

  /** Create a writer. */
  public RecordWriter(Schema schema) {
    this.schema = schema;
    shapes = new int[schema.size()][];
    parts = new ByteBuffer[schema.size()];
    for (int i = 0; i < parts.length; i++) {
      zeros(i, new int[0]);
    }
  }

  /**
   * Have a tensor of numbers of `shape`, all zeros; without a shape, that of the schema. Return its
   * bytes, little-endian, for the caller to fill in. Throws: InvalidRecord for another type or shape.
   */
  public ByteBuffer values(String name, DType dtype, int... shape) {
    int i = schema.index(name);
    if (schema.spec(i).dtype() != dtype || dtype.isText()) {
      throw new InvalidRecord(schema.spec(i), "is " + schema.spec(i).dtype() + ", not " + dtype);
    }
    zeros(i, shape);
    return Rows.littleEndian(parts[i].duplicate());
  }

  /** Set the elements of a tensor of str in C order; a shape is needed for several dimensions. */
  public void texts(String name, List<String> elements, int... shape) {
    byte[][] raw = new byte[elements.size()][];
    for (int i = 0; i < raw.length; i++) {
      ByteBuffer text = Outputs.utf8(elements.get(i));
      raw[i] = new byte[text.remaining()];
      text.get(raw[i]);
    }
    put(name, DType.STR, raw, shape);
  }

  /** Set the elements of a tensor of bytes in C order; a shape is needed for several dimensions. */
  public void bytes(String name, List<byte[]> elements, int... shape) {
    put(name, DType.BYTES, elements.toArray(byte[][]::new), shape);
  }

  private void put(String name, DType dtype, byte[][] elements, int[] shape) {
    int i = schema.index(name);
    TensorSpec spec = schema.spec(i);
    if (spec.dtype() != dtype) {
      throw new InvalidRecord(spec, "is " + spec.dtype() + ", not " + dtype);
    }
    boolean single = shape.length == 0 && spec.shape().size() == 1;
    long items = zeros(i, single ? new int[] {elements.length} : shape);
    if (items != elements.length) {
      throw new InvalidRecord(spec, elements.length + " elements do not fill its shape");
    }
    boolean scalar = spec.shape().isEmpty();
    long size = scalar ? 0 : 4L * elements.length;
    for (byte[] each : elements) {
      size += each.length;
    }
    if (size > Schema.RECORD_BYTES_MAX) {
      throw new InvalidRecord(spec, "a record has at most 1 GiB");
    }
    ByteBuffer part = Rows.littleEndian(ByteBuffer.allocate((int) size));
    for (int k = 0; !scalar && k < elements.length; k++) {
      part.putInt(elements[k].length);
    }
    for (byte[] each : elements) {
      part.put(each);
    }
    parts[i] = part.rewind();
  }

  /** Have a tensor of zeros, or of empty texts; return its number of elements. */
  private long zeros(int i, int[] given) {
    TensorSpec spec = schema.spec(i);
    int[] shape = given.length > 0 ? given : spec.shape().stream().mapToInt(size -> size).toArray();
    long items = 1;
    boolean fits = shape.length == spec.shape().size();
    for (int k = 0; fits && k < shape.length; k++) {
      fits = shape[k] >= 0 && (spec.shape().get(k) == 0 || spec.shape().get(k) == shape[k]);
      items *= shape[k];
      fits = fits && items <= Schema.RECORD_BYTES_MAX;
    }
    if (!fits) {
      throw new InvalidRecord(spec, "it has another shape");
    }
    int item = spec.isText() ? spec.shape().isEmpty() ? 0 : 4 : spec.dtype().itemBytes;
    if (items * item > Schema.RECORD_BYTES_MAX) {
      throw new InvalidRecord(spec, "a record has at most 1 GiB");
    }
    shapes[i] = shape;
    parts[i] = Rows.littleEndian(ByteBuffer.allocate((int) items * item));
    return items;
  }

  /** Return the record. Throws: InvalidRecord above 1 GiB. */
  byte[] encode() {
    ByteArrayOutputStream to = new ByteArrayOutputStream();
    ByteBuffer numbers = Rows.littleEndian(ByteBuffer.allocate(4 * schema.numbers()));
    for (int i = 0; i < parts.length; i++) {
      TensorSpec spec = schema.spec(i);
      for (int k = 0; k < shapes[i].length; k++) {
        if (spec.shape().get(k) == 0) {
          numbers.putInt(shapes[i][k]);
        }
      }
      if (spec.isText()) {
        numbers.putInt(parts[i].limit());
      }
    }
    to.writeBytes(numbers.array());
    pad(to);
    for (int i = 0; i < parts.length; i++) {
      to.writeBytes(parts[i].array());
      pad(to);
      if (to.size() > Schema.RECORD_BYTES_MAX) {
        throw new InvalidRecord(schema.spec(i), "a record has at most 1 GiB");
      }
    }
    return to.toByteArray();
  }

  private static void pad(ByteArrayOutputStream to) {
    while (to.size() % 8 != 0) {
      to.write(0);
    }
  }

  /** Set the output of row `row`; call it for each row in order. */
  public void putInto(Outputs outputs, int row) {
    byte[] record = encode();
    if (schema.isFixed()) {
      outputs.putFixed(row, record);
    } else {
      outputs.add(record);
    }
  }

  /** Fill all tensors: numbers from 0 to 1 for floats, zeros, short texts, 8 elements where free. */
  RecordWriter generate() {
    for (TensorSpec spec : schema.specs()) {
      int[] shape = spec.shape().stream().mapToInt(size -> size == 0 ? 8 : size).toArray();
      int items = 1;
      for (int size : shape) {
        items = Math.multiplyExact(items, size);
      }
      if (spec.dtype() == DType.STR) {
        texts(spec.name(), Collections.nCopies(items, "warm up"), shape);
      } else if (spec.dtype() == DType.BYTES) {
        bytes(spec.name(), Collections.nCopies(items, new byte[7]), shape);
      } else {
        ByteBuffer values = values(spec.name(), spec.dtype(), shape);
        for (int i = 1; i < items; i++) {
          if (spec.dtype() == DType.F64) {
            values.putDouble(8 * i, i / (items - 1.0));
          } else if (spec.dtype() == DType.F32) {
            values.putFloat(4 * i, (float) (i / (items - 1.0)));
          }
        }
      }
    }
    return this;
  }
}
