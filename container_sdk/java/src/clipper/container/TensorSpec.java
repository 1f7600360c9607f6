package clipper.container;

import java.util.List;

/** One tensor of a schema. shape: sizes; 0 for those that differ from row to row. */
public record TensorSpec(String name, DType dtype, List<Integer> shape) {
  static final int RANK_MAX = 8;

  /** Parse a type such as "f32[*,2]". Throws: InvalidRecord. */
  static TensorSpec parse(String name, String type) {
    int bracket = type.indexOf('[');
    InvalidRecord wrong = new InvalidRecord("tensor '" + name + "': '" + type + "' is not a type");
    try {
      DType dtype = DType.named(bracket < 0 ? type : type.substring(0, bracket));
      if (dtype == DType.ANY || bracket >= 0 && !type.endsWith("]")) {
        throw wrong;
      }
      String inner = bracket < 0 ? "" : type.substring(bracket + 1, type.length() - 1);
      String[] sizes = bracket < 0 ? new String[0] : inner.split(",", -1);
      Integer[] shape = new Integer[sizes.length];
      for (int i = 0; i < sizes.length; i++) {
        shape[i] = sizes[i].equals("*") ? 0 : Integer.parseInt(sizes[i]);
        if (shape[i] < 0 || shape[i] == 0 && !sizes[i].equals("*") || sizes.length > RANK_MAX) {
          throw wrong;
        }
      }
      return new TensorSpec(name, dtype, List.of(shape));
    } catch (IllegalArgumentException error) {
      throw wrong;
    }
  }

  /** Return true for str and bytes. */
  boolean isText() {
    return dtype.isText();
  }
}
