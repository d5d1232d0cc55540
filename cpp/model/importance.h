// How much the inputs of a model's matrices count: what llama.cpp calls an importance matrix, by
// which quantisation chooses where to err.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/model.h"

namespace h2o {

// Of one tensor, which has the matrices of all experts, or one.
struct InputSums {
  std::string name;             // as in the file: "blk.0.attn_q.weight"
  int64_t n_cols;               // of a matrix: elements of its input
  std::vector<double> squares;  // [matrices, n_cols] sums of the squared inputs
  std::vector<int64_t> counts;  // [matrices] how many inputs these were
};

// From its construction to end() it adds up the inputs of each pass of the model, of every matrix
// but those of the embedding and the output. One at a time. Throws InvalidArgument where the back
// end does not show them.
class ImportanceMatrix {
 public:
  explicit ImportanceMatrix(std::shared_ptr<Model> model);
  ~ImportanceMatrix() { end(); }
  ImportanceMatrix(const ImportanceMatrix&) = delete;
  ImportanceMatrix& operator=(const ImportanceMatrix&) = delete;

  void end();

  // In the order of layers. Not while the model computes.
  const std::vector<InputSums>& sums() const { return sums_; }

 private:
  struct Place {  // of a matrix in sums_
    size_t tensor;
    int64_t matrix;
  };

  void follow(const std::string& name, const Tensor& weight, int64_t n_matrices);
  void add(const Tensor& weight, const Tensor& x);

  std::shared_ptr<Model> model_;
  std::vector<InputSums> sums_;
  std::unordered_map<const std::byte*, Place> places_;  // by where a matrix is in memory
};

}  // namespace h2o
