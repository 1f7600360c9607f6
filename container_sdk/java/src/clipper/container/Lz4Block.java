package clipper.container;

import java.nio.ByteBuffer;

/** Decompresses LZ4 blocks. */
final class Lz4Block {
  private static final int RATIO_MAX = 255; // of LZ4; bounds what a short block can reserve

  private Lz4Block() {}

  /** Decompress a block into exactly `size` bytes. Throws: BadFrame. */
  static ByteBuffer decode(ByteBuffer block, int size) {
    if (size > (long) RATIO_MAX * block.limit()) {
      throw new BadFrame("an LZ4 block of " + block.limit() + " bytes cannot hold " + size);
    }
    byte[] to = new byte[size];
    int end = block.limit();
    int from = 0;
    int at = 0;
    while (true) {
      if (from == end) {
        throw damaged();
      }
      int token = block.get(from++) & 0xff;
      long literals = token >> 4;
      if (literals == 15) {
        int more;
        do {
          if (from == end || literals > size + 15L) {
            throw damaged();
          }
          more = block.get(from++) & 0xff;
          literals += more;
        } while (more == 255);
      }
      if (literals > end - from || literals > size - at) {
        throw damaged();
      }
      block.get(from, to, at, (int) literals);
      from += (int) literals;
      at += (int) literals;
      if (from == end) {
        break;
      }
      if (end - from < 2) {
        throw damaged();
      }
      int offset = block.getShort(from) & 0xffff;
      from += 2;
      long match = (token & 15) + 4;
      if (match == 19) {
        int more;
        do {
          if (from == end || match > size + 19L) {
            throw damaged();
          }
          more = block.get(from++) & 0xff;
          match += more;
        } while (more == 255);
      }
      if (offset == 0 || offset > at || match > size - at) {
        throw damaged();
      }
      for (long i = 0; i < match; i++, at++) {
        to[at] = to[at - offset];
      }
    }
    if (at != size) {
      throw new BadFrame("an LZ4 block of " + at + " bytes, " + size + " were announced");
    }
    return Rows.littleEndian(ByteBuffer.wrap(to));
  }

  private static BadFrame damaged() {
    return new BadFrame("damaged LZ4 block");
  }
}
