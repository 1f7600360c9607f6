// Returns each row as it came: numbers of a free length, text or bytes. The word says which type.

#include <clipper/container.hpp>

class Echo : public clipper::Model {
 public:
  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    for (std::size_t i = 0; i < batch.size(); i++) {
      if (batch.dtype() == clipper::DType::STR) {
        outputs.add(batch.text(i));
      } else if (batch.dtype() == clipper::DType::BYTES) {
        outputs.add_bytes(batch.text(i));
      } else {
        const auto row = batch.row<float>(i);
        outputs.add(row.data(), row.size());
      }
    }
  }
};

int main(int, char** words) {
  Echo echo;
  return clipper::run(echo, {words[1], words[2]});
}
