package clipper.container;

/** Serves a model to one server or to several. */
interface Serving {
  /**
   * Answer batches until a stop is requested. Throws: Rejected; IllegalArgumentException for an
   * invalid address.
   */
  void serve() throws Rejected;

  /** Have serve() return after the current batch. Any thread. */
  void stop();
}
