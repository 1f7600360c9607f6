// A model that learns: its output is the number of labels so far, its accuracy 0.75; its confidence
// is 1 for rows with a session.

#pragma once

#include <clipper/container.hpp>

class Learner : public clipper::Model {
 public:
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
  }
  double accuracy() override { return 0.75; }

 private:
  double labels_ = 0;
};

inline int run_learner() {
  Learner learner;
  clipper::Options options("f64[2]", "f64");
  options.corrects = options.sessions = true;
  return clipper::run(learner, options);
}
