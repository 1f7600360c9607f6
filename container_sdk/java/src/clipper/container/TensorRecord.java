package clipper.container;

import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** The named tensors of one row, as views of its bytes. */
public final class TensorRecord {
  private final Schema schema;
  private final int[][] shapes;
  private final ByteBuffer[] parts;

  /** Read the named tensors of row `i` of a batch. Throws: InvalidRecord. */
  public TensorRecord(Schema schema, Batch batch, int i) {
    this(schema, Rows.littleEndian(schema.isFixed() ? batch.row(i) : batch.bytes(i)));
  }

  /** Read a record: all bytes of a little-endian buffer. */
  TensorRecord(Schema schema, ByteBuffer bytes) {
    this.schema = schema;
    shapes = new int[schema.size()][];
    parts = new ByteBuffer[schema.size()];
    int size = bytes.limit();
    if (schema.isFixed() && size != schema.recordBytes()) {
      throw new InvalidRecord("a record has " + schema.recordBytes() + " bytes, not " + size);
    }
    int number = 0;
    int at = skipped(schema.spec(0), 0, size, 4L * schema.numbers());
    for (int i = 0; i < parts.length; i++) {
      TensorSpec spec = schema.spec(i);
      shapes[i] = new int[spec.shape().size()];
      long items = 1;
      for (int k = 0; k < shapes[i].length; k++) {
        long dim = spec.shape().get(k);
        if (dim == 0) {
          dim = Integer.toUnsignedLong(bytes.getInt(number));
          number += 4;
        }
        items *= dim;
        if (items > size) {
          throw new InvalidRecord(spec, "more elements than bytes");
        }
        shapes[i][k] = (int) dim;
      }
      long partBytes = items * spec.dtype().itemBytes;
      if (spec.isText()) {
        partBytes = Integer.toUnsignedLong(bytes.getInt(number));
        number += 4;
      }
      int end = skipped(spec, at, size, partBytes);
      parts[i] = Wire.slice(bytes, at, (int) partBytes);
      check(spec, (int) items, parts[i]);
      at = end;
    }
    if (at != size) {
      throw new InvalidRecord("a record has bytes behind its last tensor");
    }
  }

  private static int skipped(TensorSpec spec, int at, int size, long bytes) {
    long end = at + (bytes + 7 & ~7L);
    if (end > size) {
      throw new InvalidRecord(spec, "the record is shorter than its tensors");
    }
    return (int) end;
  }

  private static void check(TensorSpec spec, int items, ByteBuffer part) {
    if (spec.dtype() == DType.BOOL) {
      for (int i = 0; i < part.limit(); i++) {
        if ((part.get(i) & 0xfe) != 0) {
          throw new InvalidRecord(spec, "a bool is 0 or 1");
        }
      }
    }
    if (!spec.isText()) {
      return;
    }
    long end = spec.shape().isEmpty() ? part.limit() : 4L * items;
    if (end > part.limit()) {
      throw new InvalidRecord(spec, "no room for its lengths");
    }
    for (int i = 0; !spec.shape().isEmpty() && i < items; i++) {
      end += Integer.toUnsignedLong(part.getInt(4 * i));
      if (end > part.limit()) {
        throw new InvalidRecord(spec, "its lengths go beyond its part");
      }
    }
    if (end != part.limit()) {
      throw new InvalidRecord(spec, "its lengths do not fill its part");
    }
    if (spec.dtype() == DType.STR) {
      elements(spec, items, part).forEach(element -> text(spec, element));
    }
  }

  private static List<ByteBuffer> elements(TensorSpec spec, int items, ByteBuffer part) {
    List<ByteBuffer> all = new ArrayList<>();
    if (spec.shape().isEmpty()) {
      all.add(part.duplicate());
      return all;
    }
    int at = 4 * items;
    for (int i = 0; i < items; i++) {
      int size = part.getInt(4 * i);
      all.add(part.slice(at, size));
      at += size;
    }
    return all;
  }

  private static String text(TensorSpec spec, ByteBuffer bytes) {
    try {
      return StandardCharsets.UTF_8.newDecoder().decode(bytes).toString();
    } catch (CharacterCodingException error) {
      throw new InvalidRecord(spec, "a str is not UTF-8");
    }
  }

  /** Return the shape of a tensor in this row. */
  public int[] shape(String name) {
    return shapes[schema.index(name)].clone();
  }

  /**
   * Return the numbers of a tensor in C order, as little-endian bytes: take asLongBuffer() and the
   * like of them. Throws: InvalidRecord for another type.
   */
  public ByteBuffer values(String name, DType dtype) {
    int i = schema.index(name);
    if (schema.spec(i).dtype() != dtype || dtype.isText()) {
      throw new InvalidRecord(schema.spec(i), "is " + schema.spec(i).dtype() + ", not " + dtype);
    }
    return Rows.littleEndian(parts[i].duplicate());
  }

  /** Return the elements of a tensor of str in C order. Throws: InvalidRecord for another type. */
  public List<String> texts(String name) {
    int i = schema.index(name);
    return elements(name, DType.STR).stream().map(each -> text(schema.spec(i), each)).toList();
  }

  /** Return the elements of a tensor of bytes in C order. Throws: InvalidRecord for another type. */
  public List<ByteBuffer> bytes(String name) {
    return elements(name, DType.BYTES);
  }

  private List<ByteBuffer> elements(String name, DType dtype) {
    int i = schema.index(name);
    TensorSpec spec = schema.spec(i);
    if (spec.dtype() != dtype) {
      throw new InvalidRecord(spec, "is " + spec.dtype() + ", not " + dtype);
    }
    int items = 1;
    for (int size : shapes[i]) {
      items *= size;
    }
    return elements(spec, items, parts[i]);
  }
}
