package clipper.container;

/** Each row of a batch failed when it was evaluated alone. The text is the reason of the first. */
final class AllRowsFailed extends RuntimeException {
  private static final long serialVersionUID = 1L;

  AllRowsFailed(String message) {
    super(message, null, false, false); // the reason has its own stack trace
  }
}
