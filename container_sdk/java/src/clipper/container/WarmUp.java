package clipper.container;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;

/**
 * Runs growing batches before the container connects, and times them. A model that fails here is
 * ready all the same; the reason is printed to stderr.
 */
final class WarmUp {
  private static final int ROWS_MAX = 256;
  private static final int TIMINGS_MAX = 24;
  private static final long TIME_NS = 2_000_000_000L; // for all batches after the first
  private static final long BATCH_US = 100_000; // a slower batch is the last
  private static final int ITEMS_MAX = 1 << 24;
  private static final int VARIABLE_LENGTH = 8;
  private static final int ERROR_CHARS_MAX = 1000;

  private final Model model;
  private final Options options;
  private final Outputs outputs = new Outputs();
  private Rows given;

  /** {rows, microseconds} of each batch. */
  final List<long[]> timings = new ArrayList<>();

  /** Type of one output; empty if unknown. */
  String output = "";

  /** Why it failed; empty if it did not. */
  String error = "";

  WarmUp(Model model, Options options) {
    this.model = model;
    this.options = options;
  }

  WarmUp run() {
    if (options.warmup.equals("off")) {
      return this;
    }
    try {
      given = options.warmup.isEmpty() ? generated() : opened();
      if (given != null) {
        measure();
      }
    } catch (Exception | Error failure) {
      String why = "it failed in its warm-up, and serves without: " + failure;
      System.err.println("model '" + options.name + "': " + why);
      error = why.substring(0, Math.min(why.length(), ERROR_CHARS_MAX));
      timings.clear();
      output = "";
    }
    return this;
  }

  private Rows opened() {
    ByteBuffer frame = Rows.littleEndian(ByteBuffer.wrap(Base64.getDecoder().decode(options.warmup)));
    Header header = new Header();
    if (frame.limit() < Header.BYTES) {
      throw new BadFrame("CLIPPER_WARMUP is no frame");
    }
    header.decode(frame, 0, Wire.PAYLOAD_BYTES_MAX);
    if (header.kind != Kind.PREDICT || header.payloadBytes != frame.limit() - Header.BYTES) {
      throw new BadFrame("CLIPPER_WARMUP is no PREDICT frame");
    }
    Rows rows = new Rows();
    Wire.openRows(header, frame, Header.BYTES, rows, Wire.PAYLOAD_BYTES_MAX);
    return rows;
  }

  /** Return one row: numbers from 0 to 1 for floats, zeros, or a text; null for `any`. */
  private Rows generated() {
    if (options.input.startsWith("{")) {
      return generatedRecord();
    }
    String[] words = options.input.split("[\\[\\],]");
    Rows rows = new Rows();
    rows.dtype = DType.named(words[0]);
    rows.n = 1;
    if (rows.dtype == DType.ANY) {
      return null;
    }
    rows.variable = rows.dtype.isText() || words.length > 1 && words[1].equals("*");
    rows.rank = rows.variable ? 1 : words.length - 1;
    long items = rows.dtype.isText() ? 7 : rows.variable ? VARIABLE_LENGTH : 1;
    for (int i = 0; i < rows.rank && !rows.variable; i++) {
      rows.dims[i] = Integer.parseInt(words[i + 1]);
      items = Math.multiplyExact(items, rows.dims[i]);
    }
    if (items > ITEMS_MAX) {
      return null;
    }
    rows.offsets = rows.variable ? new int[] {0, (int) items} : null;
    rows.data = Rows.littleEndian(ByteBuffer.allocate((int) items * rows.dtype.itemBytes));
    if (rows.dtype.isText()) {
      rows.data.put(0, "warm up".getBytes(StandardCharsets.US_ASCII));
    }
    for (int i = 1; i < items; i++) {
      if (rows.dtype == DType.F64) {
        rows.data.putDouble(8 * i, i / (items - 1.0));
      } else if (rows.dtype == DType.F32) {
        rows.data.putFloat(4 * i, (float) (i / (items - 1.0)));
      }
    }
    return rows;
  }

  private Rows generatedRecord() {
    Schema schema = Schema.parse(options.input);
    byte[] record = new RecordWriter(schema).generate().encode();
    Rows rows = new Rows();
    rows.dtype = schema.isFixed() ? DType.U8 : DType.BYTES;
    rows.n = 1;
    rows.rank = 1;
    rows.variable = !schema.isFixed();
    rows.dims[0] = rows.variable ? 0 : record.length;
    rows.offsets = rows.variable ? new int[] {0, record.length} : null;
    rows.data = Rows.littleEndian(ByteBuffer.wrap(record));
    return rows;
  }

  private Rows repeated(int n) {
    Rows rows = new Rows();
    rows.dtype = given.dtype;
    rows.n = n;
    rows.rank = given.rank;
    System.arraycopy(given.dims, 0, rows.dims, 0, 4);
    rows.variable = given.variable;
    int item = given.dtype.itemBytes;
    int fixed = given.data.limit() / given.n;
    int size = 0;
    rows.offsets = new int[n + 1];
    for (int pass = 0; pass < 2; pass++) {
      rows.data = pass == 0 ? null : Rows.littleEndian(ByteBuffer.allocateDirect(size));
      size = 0;
      for (int i = 0; i < n; i++) {
        int from = i % given.n;
        int start = given.variable ? given.offsets[from] * item : from * fixed;
        int end = given.variable ? given.offsets[from + 1] * item : start + fixed;
        if (rows.data != null) {
          rows.data.put(size, given.data, start, end - start);
        }
        size += end - start;
        rows.offsets[i + 1] = size / item;
      }
    }
    return rows;
  }

  private long runOne(int n) throws Exception {
    Rows rows = repeated(n);
    long started = System.nanoTime();
    Evaluation.run(model, rows, options.retrySingly, outputs);
    outputs.encode(0, 0, false, true, Wire.PAYLOAD_BYTES_MAX);
    return (System.nanoTime() - started) / 1000;
  }

  private void measure() throws Exception {
    runOne(1);
    long ends = System.nanoTime() + TIME_NS;
    int most = options.batchMax == 0 ? ROWS_MAX : Math.min(options.batchMax, ROWS_MAX);
    long items = given.data.limit() / given.n / given.dtype.itemBytes;
    int times = 3;
    for (int n = 1; n <= most && n * items <= ITEMS_MAX; n *= 2) {
      if (timings.size() + times > TIMINGS_MAX) {
        return;
      }
      long tookUs = 0;
      for (int i = 0; i < times; i++) {
        tookUs = runOne(n);
        timings.add(new long[] {n, tookUs});
        output = options.output.startsWith("{") ? options.output : outputs.type();
        if (System.nanoTime() > ends) {
          return;
        }
      }
      if (tookUs > BATCH_US) {
        return;
      }
      times = 2;
    }
  }
}
