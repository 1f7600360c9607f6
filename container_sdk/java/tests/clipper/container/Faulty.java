package clipper.container;

/** A model whose rows say what goes wrong. Rows are str; the output of a good row is its text. */
final class Faulty implements Model {
  public static void main(String[] words) throws Exception {
    Options options = new Options("str", "str");
    if (words.length > 0) {
      answerUnknownIds(options.fromEnvironment(System.getenv()));
    }
    Container.run(new Faulty(), options);
  }

  @Override
  public void predict(Batch batch, Outputs outputs) throws Exception {
    for (int i = 0; i < batch.size(); i++) {
      String text = batch.text(i);
      switch (text) {
        case "throw" -> throw new IllegalStateException("this row cannot be read\nat frame 0");
        case "exit" -> Runtime.getRuntime().halt(7);
        case "kill" -> new ProcessBuilder("kill", "-9", "" + ProcessHandle.current().pid()).start();
        case "hang" -> Thread.sleep(3_600_000);
        case "count" -> outputs.add("one more");
        case "row" -> outputs.fail(i, "only this row");
        default -> { }
      }
      if (text.equals("kill")) {
        Thread.sleep(3_600_000);
      }
      outputs.add(text.equals("large") ? "x".repeat(65 << 20) : text);
    }
  }

  /** Answer every batch with the id of another: what the SDK never sends. */
  private static void answerUnknownIds(Options options) throws Exception {
    try (Connection connection = new Connection(options.address)) {
      Container container = new Container(new Faulty(), options);
      connection.send(Wire.controlFrame(Kind.HELLO, container.hello(), 0, false));
      Header header = new Header();
      Outputs outputs = new Outputs();
      while (true) {
        connection.nextMessage(0);
        header.decode(connection.buffer(), connection.take(Header.BYTES), Wire.PAYLOAD_BYTES_MAX);
        connection.take(header.payloadBytes);
        if (header.kind == Kind.PREDICT) {
          outputs.reset(header.rows);
          for (int i = 0; i < header.rows; i++) {
            outputs.add("a reply to nobody");
          }
          long id = header.id + 1000;
          connection.send(outputs.encode(id, 0, false, false, Wire.PAYLOAD_BYTES_MAX));
        }
      }
    } catch (Disconnected error) {
      System.err.println(error.getMessage());
      System.exit(1);
    }
  }
}
