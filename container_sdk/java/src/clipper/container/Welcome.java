package clipper.container;

import java.util.Map;

/** The fields of WELCOME. */
record Welcome(
    long heartbeatMs, long payloadBytesMax, boolean crc, boolean accuracy, boolean qualifiers,
    boolean quiet) {

  /** Check and convert the fields. Throws: BadFrame. */
  static Welcome read(Map<String, Object> fields) {
    return new Welcome(
        number(fields, "heartbeat_ms", 500),
        number(fields, "payload_bytes_max", Wire.PAYLOAD_BYTES_MAX),
        Boolean.TRUE.equals(fields.get("crc")),
        Boolean.TRUE.equals(fields.get("accuracy")),
        Boolean.TRUE.equals(fields.get("qualifiers")),
        Boolean.TRUE.equals(fields.get("quiet")));
  }

  private static long number(Map<String, Object> fields, String key, long otherwise) {
    if (!fields.containsKey(key)) {
      return otherwise;
    }
    if (fields.get(key) instanceof Long value && value > 0 && value >> 40 == 0) {
      return value;
    }
    throw new BadFrame("WELCOME's " + key + " is not a number above 0");
  }
}
