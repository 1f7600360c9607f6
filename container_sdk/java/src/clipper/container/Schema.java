package clipper.container;

import java.util.ArrayList;
import java.util.List;

/** The named tensors of a row, in order: docs/wire.md, "Several named tensors: records". */
public final class Schema {
  static final int TENSORS_MAX = 64;
  static final int NAME_MAX = 128;
  static final int RECORD_BYTES_MAX = 1 << 30;

  private final List<TensorSpec> specs = new ArrayList<>();
  private int numbers;
  private long recordBytes;

  private Schema() {}

  /**
   * Parse a JSON object of types by name, as {"ids": "i64[*]", "mask": "i64[*]"}: what HELLO has as
   * input or output. Throws: InvalidRecord.
   */
  public static Schema parse(String json) {
    Schema schema = new Schema();
    new Reader(json).readInto(schema);
    if (schema.specs.isEmpty()) {
      throw new InvalidRecord("a schema has at least one tensor");
    }
    return schema;
  }

  /** Return the tensors. */
  public List<TensorSpec> specs() {
    return List.copyOf(specs);
  }

  /** Return true if all records have the same bytes in the same places. */
  public boolean isFixed() {
    return numbers == 0;
  }

  /** Return the bytes of a record of a fixed schema. */
  public int recordBytes() {
    return (int) recordBytes;
  }

  /** Return the number of u32 sizes at the start of a record. */
  int numbers() {
    return numbers;
  }

  TensorSpec spec(int i) {
    return specs.get(i);
  }

  int size() {
    return specs.size();
  }

  /** Return the place of a tensor. Throws: InvalidRecord for a name that is unknown. */
  int index(String name) {
    for (int i = 0; i < specs.size(); i++) {
      if (specs.get(i).name().equals(name)) {
        return i;
      }
    }
    throw new InvalidRecord("there is no tensor '" + name + "'");
  }

  private void add(TensorSpec spec) {
    for (TensorSpec other : specs) {
      if (other.name().equals(spec.name())) {
        throw new InvalidRecord(spec, "is named twice");
      }
    }
    if (spec.name().isEmpty() || spec.name().length() > NAME_MAX || specs.size() == TENSORS_MAX) {
      throw new InvalidRecord("a schema has at most 64 tensors, with names of 1 to 128 characters");
    }
    long items = 1;
    for (int size : spec.shape()) {
      numbers += size == 0 ? 1 : 0;
      items *= Math.max(size, 1);
      if (items > RECORD_BYTES_MAX) {
        throw new InvalidRecord(spec, "a record has at most 1 GiB");
      }
    }
    numbers += spec.isText() ? 1 : 0;
    recordBytes += items * spec.dtype().itemBytes + 7 & ~7L;
    if (recordBytes > RECORD_BYTES_MAX) {
      throw new InvalidRecord(spec, "a record has at most 1 GiB");
    }
    specs.add(spec);
  }

  /** Reads a JSON object of strings. */
  private static final class Reader {
    private final String text;
    private int at;

    Reader(String text) {
      this.text = text;
    }

    void readInto(Schema schema) {
      expect('{');
      while (!next('}')) {
        if (schema.size() > 0) {
          expect(',');
        }
        String name = string();
        expect(':');
        schema.add(TensorSpec.parse(name, string()));
      }
      at++;
      next('\0');
      if (at < text.length()) {
        throw wrong();
      }
    }

    private InvalidRecord wrong() {
      return new InvalidRecord("'" + text + "' is no schema: write {\"ids\": \"i64[*]\"}");
    }

    private boolean next(char c) {
      while (at < text.length() && Character.isWhitespace(text.charAt(at))) {
        at++;
      }
      return at < text.length() && text.charAt(at) == c;
    }

    private void expect(char c) {
      if (!next(c)) {
        throw wrong();
      }
      at++;
    }

    private char take() {
      if (at == text.length()) {
        throw wrong();
      }
      return text.charAt(at++);
    }

    private String string() {
      expect('"');
      StringBuilder value = new StringBuilder();
      for (char c = take(); c != '"'; c = take()) {
        if (c == '\\') {
          c = take();
          if (c == 'u') {
            if (text.length() - at < 4) {
              throw wrong();
            }
            c = (char) Integer.parseInt(text.substring(at, at + 4), 16);
            at += 4;
          } else {
            c = c == 'n' ? '\n' : c == 't' ? '\t' : c;
          }
        }
        value.append(c);
      }
      return value.toString();
    }
  }
}
