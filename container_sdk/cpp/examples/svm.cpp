// A linear SVM: the class of a row is the index of the largest w x + b. The file of weights has one
// line per class: b, then w.

#include <fstream>
#include <sstream>

#include <clipper/container.hpp>

class Svm : public clipper::Model {
 public:
  explicit Svm(const char* path) : path_(path) {}

  void load() override {
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      weights_.emplace_back();
      for (double value; words >> value;) weights_.back().push_back(value);
    }
    if (weights_.empty()) throw std::runtime_error(std::string("no weights in ") + path_);
  }

  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    std::int64_t* classes = outputs.values<std::int64_t>();
    for (std::size_t i = 0; i < batch.size(); i++) classes[i] = best(batch.row<double>(i));
  }

 private:
  std::int64_t best(clipper::Span<double> row) const {
    std::size_t best = 0;
    double best_score = -1e300;
    for (std::size_t c = 0; c < weights_.size(); c++) {
      const auto& w = weights_[c];
      if (row.size() + 1 != w.size()) throw std::invalid_argument("a row has another length");
      double score = w[0];
      for (std::size_t i = 0; i < row.size(); i++) score += w[i + 1] * row[i];
      if (score > best_score) {
        best = c;
        best_score = score;
      }
    }
    return static_cast<std::int64_t>(best);
  }

  const char* path_;
  std::vector<std::vector<double>> weights_;
};

int main(int count, char** words) {
  Svm svm(count > 1 ? words[1] : "svm.txt");
  return clipper::run(svm, {"f64[*]", "i64"});
}
