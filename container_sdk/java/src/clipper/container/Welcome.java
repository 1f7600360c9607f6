package clipper.container;

import java.util.Map;

/** The fields of WELCOME. */
record Welcome(
    long heartbeatMs, long payloadBytesMax, boolean crc, boolean accuracy, boolean qualifiers,
    boolean quiet, boolean partial) {

  static final long HEARTBEAT_MS_MAX = 3_600_000;
  private static final long BYTES_MAX = (1L << 40) - 1;

  /** Check and convert the fields. Throws: BadFrame. */
  static Welcome read(Map<String, Object> fields) {
    return new Welcome(
        number(fields, "heartbeat_ms", 500, HEARTBEAT_MS_MAX),
        number(fields, "payload_bytes_max", Wire.PAYLOAD_BYTES_MAX, BYTES_MAX),
        Boolean.TRUE.equals(fields.get("crc")),
        Boolean.TRUE.equals(fields.get("accuracy")),
        Boolean.TRUE.equals(fields.get("qualifiers")),
        Boolean.TRUE.equals(fields.get("quiet")),
        Boolean.TRUE.equals(fields.get("partial")));
  }

  private static long number(
      Map<String, Object> fields, String key, long otherwise, long most) {
    if (!fields.containsKey(key)) {
      return otherwise;
    }
    if (fields.get(key) instanceof Long value && value > 0 && value <= most) {
      return value;
    }
    throw new BadFrame("WELCOME's " + key + " is not a number from 1 to " + most);
  }
}
