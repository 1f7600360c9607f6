package clipper.container;

import java.nio.DoubleBuffer;

/**
 * A model that learns: its output is the number of labels so far, its accuracy 0.75; its confidence is
 * 1 for rows with a session. A stubborn one throws from correct() and accuracy().
 */
final class Learner implements Model {
  private final boolean stubborn;
  private double labels;

  Learner(boolean stubborn) {
    this.stubborn = stubborn;
  }

  public static void main(String[] words) {
    Container.run(new Learner(words.length > 0), new Options("f64[2]", "f64").corrects().sessions());
  }

  @Override
  public void predict(Batch batch, Outputs outputs) {
    DoubleBuffer counts = outputs.doubles();
    for (int i = 0; i < batch.size(); i++) {
      counts.put(i, labels);
      outputs.confidence()[i] = batch.session(i) == 0 ? 0f : 1f;
    }
  }

  @Override
  public void correct(Batch inputs, Batch correct) {
    labels += inputs.size();
    if (stubborn) {
      throw new IllegalStateException("learns nothing");
    }
  }

  @Override
  public double accuracy() {
    if (stubborn) {
      throw new IllegalStateException("knows nothing");
    }
    return 0.75;
  }
}
