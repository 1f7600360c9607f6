package clipper.container;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * The msgpack maps of HELLO and WELCOME.
 *
 * <p>Values are String, Long, Boolean, or a List of long[] (written only). A value of another type
 * is read as null.
 */
final class MessagePack {
  private static final int DEPTH_MAX = 8;
  private static final int KEYS_MAX = 1024;

  private MessagePack() {}

  // -- writing: each value as short as it can be

  /** Encode a map. */
  static byte[] encode(Map<String, Object> fields) {
    ByteArrayOutputStream to = new ByteArrayOutputStream();
    size(to, fields.size(), 0x80, 0xde);
    for (Map.Entry<String, Object> field : fields.entrySet()) {
      string(to, field.getKey());
      Object value = field.getValue();
      if (value instanceof Boolean on) {
        to.write(on ? 0xc3 : 0xc2);
      } else if (value instanceof Number number) {
        integer(to, number.longValue());
      } else if (value instanceof List<?> pairs) {
        size(to, pairs.size(), 0x90, 0xdc);
        for (Object pair : pairs) {
          long[] both = (long[]) pair;
          to.write(0x92);
          integer(to, both[0]);
          integer(to, both[1]);
        }
      } else {
        string(to, String.valueOf(value));
      }
    }
    return to.toByteArray();
  }

  private static void bigEndian(ByteArrayOutputStream to, long value, int size) {
    for (int i = size - 1; i >= 0; i--) {
      to.write((int) (value >>> (8 * i)));
    }
  }

  private static void size(ByteArrayOutputStream to, int count, int fix, int code16) {
    if (count < 16) {
      to.write(fix | count);
    } else {
      to.write(code16);
      bigEndian(to, count, 2);
    }
  }

  private static void string(ByteArrayOutputStream to, String text) {
    byte[] raw = text.getBytes(StandardCharsets.UTF_8);
    int size = Math.min(raw.length, 0xffff);
    if (size < 32) {
      to.write(0xa0 | size);
    } else if (size < 256) {
      to.write(0xd9);
      bigEndian(to, size, 1);
    } else {
      to.write(0xda);
      bigEndian(to, size, 2);
    }
    to.write(raw, 0, size);
  }

  private static void integer(ByteArrayOutputStream to, long value) {
    if (value >= 0 && value < 128) {
      to.write((int) value);
      return;
    }
    int power = value >>> 8 == 0 ? 0 : value >>> 16 == 0 ? 1 : value >>> 32 == 0 ? 2 : 3;
    to.write(0xcc + power);
    bigEndian(to, value, 1 << power);
  }

  // -- reading: nesting and lengths are bounded by the bytes present

  /** Decode a map. Throws: BadFrame. */
  static Map<String, Object> decode(ByteBuffer payload) {
    ByteBuffer from = payload.duplicate().order(ByteOrder.BIG_ENDIAN);
    long count = mapSize(from, octet(from));
    Map<String, Object> fields = new LinkedHashMap<>();
    for (long i = 0; i < count; i++) {
      if (!(value(from, 0) instanceof String key) || fields.size() == KEYS_MAX) {
        throw wrong();
      }
      fields.put(key, value(from, 0));
    }
    if (count < 0 || from.hasRemaining()) {
      throw wrong();
    }
    return fields;
  }

  private static BadFrame wrong() {
    return new BadFrame("the payload is not a msgpack map");
  }

  private static int octet(ByteBuffer from) {
    if (!from.hasRemaining()) {
      throw wrong();
    }
    return from.get() & 0xff;
  }

  private static long bigEndian(ByteBuffer from, int size) {
    long value = 0;
    for (int i = 0; i < size; i++) {
      value = value << 8 | octet(from);
    }
    return value;
  }

  private static String take(ByteBuffer from, long size) {
    if (size > from.remaining()) {
      throw wrong();
    }
    byte[] raw = new byte[(int) size];
    from.get(raw);
    return new String(raw, StandardCharsets.UTF_8);
  }

  private static long mapSize(ByteBuffer from, int code) {
    return code >> 4 == 8 ? code & 15 : code >> 1 == 0x6f ? bigEndian(from, 2 << (code & 1)) : -1;
  }

  private static long arraySize(ByteBuffer from, int code) {
    return code >> 4 == 9 ? code & 15 : code >> 1 == 0x6e ? bigEndian(from, 2 << (code & 1)) : -1;
  }

  private static Object value(ByteBuffer from, int depth) {
    int code = octet(from);
    if (depth > DEPTH_MAX) {
      throw wrong();
    }
    if (code < 0x80 || code >= 0xe0) {
      return (long) (byte) code;
    }
    if (code >> 5 == 5) {
      return take(from, code & 31);
    }
    long count = mapSize(from, code);
    long values = count >= 0 ? 2 * count : arraySize(from, code);
    if (values >= 0) {
      for (long i = 0; i < values; i++) {
        value(from, depth + 1);
      }
      return null;
    }
    return switch (code) {
      case 0xc0 -> null;
      case 0xc2, 0xc3 -> code == 0xc3;
      case 0xc4, 0xc5, 0xc6 -> skip(from, bigEndian(from, 1 << (code - 0xc4)));
      case 0xc7, 0xc8, 0xc9 -> skip(from, bigEndian(from, 1 << (code - 0xc7)) + 1);
      case 0xca -> skip(from, 4);
      case 0xcb -> skip(from, 8);
      case 0xcc, 0xcd, 0xce, 0xcf -> bigEndian(from, 1 << (code - 0xcc));
      case 0xd0 -> (long) (byte) bigEndian(from, 1);
      case 0xd1 -> (long) (short) bigEndian(from, 2);
      case 0xd2 -> (long) (int) bigEndian(from, 4);
      case 0xd3 -> bigEndian(from, 8);
      case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8 -> skip(from, (1L << (code - 0xd4)) + 1);
      case 0xd9, 0xda, 0xdb -> take(from, bigEndian(from, 1 << (code - 0xd9)));
      default -> throw wrong();
    };
  }

  private static Object skip(ByteBuffer from, long size) {
    take(from, size);
    return null;
  }
}
