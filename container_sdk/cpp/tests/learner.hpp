// A model that learns: its output is the number of labels so far, its accuracy 0.75; its confidence
// is 1 for rows with a session. A stubborn one throws from correct() and accuracy().

#pragma once

#include <clipper/container.hpp>

class Learner : public clipper::Model {
 public:
  explicit Learner(bool stubborn) : stubborn_(stubborn) {}
  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    double* counts = outputs.values<double>();
    float* confidence = outputs.confidence();
    for (std::size_t i = 0; i < batch.size(); i++) {
      counts[i] = labels_;
      confidence[i] = batch.session(i) ? 1.0f : 0.0f;
    }
  }
  void correct(const clipper::Batch& inputs, const clipper::Batch&) override {
    labels_ += static_cast<double>(inputs.size());
    if (stubborn_) throw std::runtime_error("learns nothing");
  }
  double accuracy() override {
    if (stubborn_) throw std::runtime_error("knows nothing");
    return 0.75;
  }

 private:
  bool stubborn_;
  double labels_ = 0;
};

inline int run_learner(bool stubborn) {
  Learner learner(stubborn);
  clipper::Options options("f64[2]", "f64");
  options.corrects = options.sessions = true;
  return clipper::run(learner, options);
}
