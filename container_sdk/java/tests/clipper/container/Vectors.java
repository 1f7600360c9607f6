package clipper.container;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.function.IntFunction;

/**
 * Decodes frames, one per line of stdin: the protocol's version, a space, hexadecimal. Prints for each
 * a line of JSON: what it means, and the frame encoded again, or {"error": TEXT}. A record is the
 * version r, hexadecimal, a space and its schema.
 */
final class Vectors {
  private Vectors() {}

  public static void main(String[] words) throws Exception {
    PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      int end = line.indexOf(' ', 2) < 0 ? line.length() : line.indexOf(' ', 2);
      byte[] raw = HexFormat.of().parseHex(line.substring(2, end));
      ByteBuffer frame = Rows.littleEndian(ByteBuffer.wrap(raw));
      try {
        char version = line.charAt(0);
        String schema = version == 'r' ? line.substring(end + 1) : "";
        String shown = version == '1' ? readV1(frame) : version == '2' ? readV2(frame) : "";
        out.println(version == 'r' ? readRecord(Schema.parse(schema), frame) : shown);
      } catch (BadFrame | InvalidRecord error) {
        out.println("{\"error\": " + quoted(error.getMessage()) + "}");
      }
    }
    out.flush();
  }

  private static String readRecord(Schema schema, ByteBuffer bytes) {
    TensorRecord record = new TensorRecord(schema, bytes);
    RecordWriter writer = new RecordWriter(schema);
    StringBuilder to = new StringBuilder("{\"values\": {");
    for (TensorSpec spec : schema.specs()) {
      String name = spec.name();
      int[] shape = record.shape(name);
      IntFunction<String> elementOf;
      if (spec.dtype() == DType.STR) {
        writer.texts(name, record.texts(name), shape);
        elementOf = i -> quoted(record.texts(name).get(i));
      } else if (spec.dtype() == DType.BYTES) {
        List<byte[]> all = record.bytes(name).stream().map(Vectors::array).toList();
        writer.bytes(name, all, shape);
        elementOf = i -> quoted(HexFormat.of().formatHex(all.get(i)));
      } else {
        writer.values(name, spec.dtype(), shape).put(record.values(name, spec.dtype()));
        Rows rows = new Rows();
        rows.dtype = spec.dtype();
        rows.data = record.values(name, spec.dtype());
        elementOf = i -> element(rows, i);
      }
      to.append(to.length() > 12 ? ", " : "").append(quoted(name)).append(": ");
      to.append(nested(shape, 0, new int[1], elementOf));
    }
    return to + "}, \"again\": \"" + HexFormat.of().formatHex(writer.encode()) + "\"}";
  }

  private static byte[] array(ByteBuffer bytes) {
    byte[] copy = new byte[bytes.remaining()];
    bytes.get(copy);
    return copy;
  }

  private static String nested(int[] shape, int depth, int[] at, IntFunction<String> elementOf) {
    return depth == shape.length
        ? elementOf.apply(at[0]++)
        : list(shape[depth], i -> nested(shape, depth + 1, at, elementOf));
  }

  private static String readV1(ByteBuffer batch) {
    int size = batch.limit() - Wire.V1_HEAD_BYTES;
    if (size < 0 || Wire.v1ContentBytes(batch, 0, Wire.PAYLOAD_BYTES_MAX) != size) {
      throw new BadFrame("the batch has another length");
    }
    Rows rows = new Rows();
    Wire.openV1(batch, 0, size, rows, Wire.PAYLOAD_BYTES_MAX);
    return "{\"values\": " + values(rows) + "}";
  }

  private static String readV2(ByteBuffer frame) {
    if (frame.limit() < Header.BYTES) {
      throw new BadFrame("a header has 64 bytes");
    }
    Header header = new Header();
    header.decode(frame, 0, Wire.PAYLOAD_BYTES_MAX);
    if (header.payloadBytes != frame.limit() - Header.BYTES) {
      throw new BadFrame("the frame has another length");
    }
    StringBuilder to = new StringBuilder("{\"kind\": " + quoted(header.kind.name()));
    put(to, "dtype", quoted(header.dtype.toString()));
    put(to, "flags", "" + header.flags);
    put(to, "rows", "" + header.rows);
    put(to, "id", Long.toUnsignedString(header.id));
    put(to, "time_us", Long.toUnsignedString(header.timeUs));
    put(to, "payload_crc", Integer.toUnsignedString(header.payloadCrc));
    put(to, "shape", list(header.rank, i -> "" + header.dim(i)));
    ByteBuffer again = null;
    if (header.has(Header.SHARED)) {
      long[][] runs = Wire.openRuns(header, frame, Header.BYTES);
      put(to, "runs", list(runs.length, i -> list(3, k -> Long.toUnsignedString(runs[i][k]))));
    } else if (header.kind == Kind.PREDICT || header.kind == Kind.REPLY) {
      Rows rows = new Rows();
      Wire.openRows(header, frame, Header.BYTES, rows, Wire.PAYLOAD_BYTES_MAX);
      describe(to, rows);
      again = header.kind == Kind.REPLY ? encodedAgain(header, rows) : null;
    } else if (header.kind == Kind.FEEDBACK) {
      Rows[] both = Wire.openFeedback(header, frame, Header.BYTES, Wire.PAYLOAD_BYTES_MAX);
      put(to, "inputs", values(both[0]));
      put(to, "labels", values(both[1]));
      put(to, "sessions", sessions(both[0]));
    } else {
      again = readControl(header, frame, to);
    }
    if (again != null) {
      byte[] raw = new byte[again.limit()];
      again.get(0, raw);
      put(to, "again", quoted(HexFormat.of().formatHex(raw)));
    }
    return to.append("}").toString();
  }

  private static ByteBuffer readControl(Header header, ByteBuffer frame, StringBuilder to) {
    header.checkPayload(frame, Header.BYTES);
    byte[] payload = new byte[header.payloadBytes];
    frame.get(Header.BYTES, payload);
    switch (header.kind) {
      case REGION -> {
        long[] region = Wire.openRegion(header, frame, Header.BYTES);
        put(to, "region", "" + region[0]);
        put(to, "region_rows", Long.toUnsignedString(region[1]));
        put(to, "row_bytes", Long.toUnsignedString(region[2]));
      }
      case ACCURACY -> {
        double accuracy = Wire.openAccuracy(header, frame, Header.BYTES);
        put(to, "learned", Long.toUnsignedString(frame.getLong(Header.BYTES)));
        put(to, "failed", Long.toUnsignedString(frame.getLong(Header.BYTES + 8)));
        put(to, "accuracy", Double.isNaN(accuracy) ? "null" : "" + accuracy);
      }
      case HELLO, WELCOME -> {
        ByteBuffer map = Wire.slice(frame, Header.BYTES, header.payloadBytes);
        Map<String, Object> fields = MessagePack.decode(map);
        payload = MessagePack.encode(fields);
        if (header.kind == Kind.WELCOME) {
          Welcome.read(fields);
        }
      }
      default -> put(to, "text", quoted(new String(payload, StandardCharsets.UTF_8)));
    }
    return Wire.controlFrame(header.kind, payload, header.id, header.has(Header.CHECKED));
  }

  /** Return a REPLY again, through Outputs; null for what Outputs does not write. */
  private static ByteBuffer encodedAgain(Header header, Rows rows) {
    Outputs outputs = new Outputs();
    outputs.reset(rows.n);
    Batch batch = new Batch(rows);
    // Outputs knows whether other replies follow.
    if (rows.status != null || header.has(Header.PARTIAL) || rows.variable && !rows.dtype.isText()) {
      return null;
    }
    if (rows.variable) {
      for (int i = 0; i < rows.n; i++) {
        ByteBuffer part = rows.data.slice(batch.start(i), batch.length(i));
        byte[] raw = new byte[part.limit()];
        part.get(raw);
        if (rows.dtype == DType.STR) {
          outputs.add(new String(raw, StandardCharsets.UTF_8));
        } else {
          outputs.add(raw);
        }
      }
    } else {
      outputs.values(rows.dtype, batch.shape()).put(rows.data.duplicate());
    }
    for (int i = 0; rows.confidence != null && i < rows.n; i++) {
      outputs.confidence()[i] = rows.confidence.getFloat(4 * i);
    }
    for (int i = 0; rows.qualifiers != null && i < rows.n; i++) {
      outputs.qualify(i, qualifier(rows, i));
    }
    boolean checked = header.has(Header.CHECKED);
    return outputs.encode(header.id, header.timeUs, checked, true, Wire.PAYLOAD_BYTES_MAX);
  }

  private static byte[] qualifier(Rows rows, int i) {
    int start = rows.qualifierOffsets[i];
    byte[] raw = new byte[rows.qualifierOffsets[i + 1] - start];
    rows.qualifiers.get(start, raw);
    return raw;
  }

  private static void describe(StringBuilder to, Rows rows) {
    put(to, "values", values(rows));
    if (rows.sessions != null) {
      put(to, "sessions", sessions(rows));
    }
    if (rows.confidence != null) {
      put(to, "confidence", list(rows.n, i -> decimal(rows.confidence.getFloat(4 * i))));
    }
    if (rows.qualifiers != null) {
      IntFunction<String> one = i -> quoted(HexFormat.of().formatHex(qualifier(rows, i)));
      put(to, "qualifiers", list(rows.n, one));
    }
    if (rows.status != null) {
      put(to, "status", list(rows.n, i -> "" + rows.status.get(i)));
      put(to, "text", quoted(StandardCharsets.UTF_8.decode(rows.text.duplicate()).toString()));
    }
  }

  private static String sessions(Rows rows) {
    return list(rows.n, i -> Long.toUnsignedString(rows.sessions.getLong(8 * i)));
  }

  private static String values(Rows rows) {
    Batch batch = new Batch(rows);
    if (!rows.variable) {
      int[] at = {0};
      return list(rows.n, i -> rows.data.limit() == 0 ? "[]" : nested(rows, 0, at));
    }
    return list(
        rows.n,
        i -> {
          ByteBuffer part = rows.data.slice(batch.start(i) * rows.dtype.itemBytes, 
              batch.length(i) * rows.dtype.itemBytes);
          byte[] raw = new byte[part.limit()];
          part.get(raw);
          return switch (rows.dtype) {
            case STR -> quoted(new String(raw, StandardCharsets.UTF_8));
            case BYTES -> quoted(HexFormat.of().formatHex(raw));
            default -> list(batch.length(i), k -> element(rows, batch.start(i) + k));
          };
        });
  }

  private static String nested(Rows rows, int depth, int[] at) {
    return depth == rows.rank
        ? element(rows, at[0]++)
        : list(rows.dims[depth], i -> nested(rows, depth + 1, at));
  }

  private static String element(Rows rows, int i) {
    ByteBuffer data = rows.data;
    return switch (rows.dtype) {
      case BOOL -> data.get(i) == 1 ? "true" : "false";
      case U8 -> "" + (data.get(i) & 0xff);
      case I8 -> "" + data.get(i);
      case U16 -> "" + (data.getShort(2 * i) & 0xffff);
      case I16 -> "" + data.getShort(2 * i);
      case U32 -> Integer.toUnsignedString(data.getInt(4 * i));
      case I32 -> "" + data.getInt(4 * i);
      case U64 -> Long.toUnsignedString(data.getLong(8 * i));
      case I64 -> "" + data.getLong(8 * i);
      case F32 -> decimal(data.getFloat(4 * i));
      case F64 -> decimal(data.getDouble(8 * i));
      default -> decimal(half(data.getShort(2 * i)));
    };
  }

  private static double half(short bits) {
    int exponent = bits >> 10 & 31;
    int fraction = bits & 1023;
    double sign = bits < 0 ? -1 : 1;
    if (exponent == 31) {
      return fraction == 0 ? sign / 0 : Double.NaN;
    }
    return sign * (exponent == 0 ? fraction : 1024 + fraction)
        * Math.pow(2, exponent == 0 ? -24 : exponent - 25);
  }

  private static String decimal(double value) {
    return Double.toString(value);
  }

  private static String list(int n, IntFunction<String> textOf) {
    StringBuilder to = new StringBuilder("[");
    for (int i = 0; i < n; i++) {
      to.append(i == 0 ? "" : ",").append(textOf.apply(i));
    }
    return to.append("]").toString();
  }

  private static void put(StringBuilder to, String key, String value) {
    to.append(", ").append(quoted(key)).append(": ").append(value);
  }

  private static String quoted(String text) {
    StringBuilder to = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\' || c < 32 || Character.isSurrogate(c)) {
        to.append(String.format("\\u%04x", (int) c));
      } else {
        to.append(c);
      }
    }
    return to.append("\"").toString();
  }
}
