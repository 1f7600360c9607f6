package clipper.container;

/**
 * A model. One thread calls all methods. An exception of predict() fails its batch, or with
 * Options.retrySingly those rows that throw alone.
 */
public interface Model {
  /** Prepare the model, once, before the container connects. An exception ends the process. */
  default void load() throws Exception {}

  /** Evaluate a batch. */
  void predict(Batch batch, Outputs outputs) throws Exception;

  /** Learn from correct outputs (Options.corrects). Called when no batch waits. */
  default void correct(Batch inputs, Batch labels) throws Exception {}

  /** Return the model's own accuracy from 0 to 1, reported to the server; NaN if unknown. */
  default double accuracy() {
    return Double.NaN;
  }
}
