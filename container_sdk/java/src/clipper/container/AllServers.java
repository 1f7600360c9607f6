package clipper.container;

import java.net.Inet6Address;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.UnknownHostException;
import java.security.Security;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Serves a model to several servers at once: to all that are listed, or that a host stands for.
 *
 * <p>Each server has a connection and a thread; the model evaluates one batch at a time, in
 * the order in which they came. Names are looked up every LOOK_UP_MS, so servers that come are
 * connected to, and those that are gone from the name are left once their connection is lost. A server that says
 * GOODBYE or rejects the container is tried again later, for as long as its address is listed.
 */
final class AllServers implements Serving {
  private static final long LOOK_UP_MS = 2_000;
  private static final int SERVERS_MAX = 1024;

  static {
    // A JVM keeps what a name stands for, by default for 30 s.
    Security.setProperty("networkaddress.cache.ttl", "1");
    Security.setProperty("networkaddress.cache.negative.ttl", "1");
  }

  /** The connection to one server. Its thread writes `rejected` and `error` before it ends. */
  private final class Server {
    private final Container container;
    private final Thread thread;
    private final long startedNs = System.nanoTime();
    private volatile String rejected = "";
    private volatile Throwable error;

    Server(String address) {
      container = new Container(model, options, address, warm, turn);
      thread = new Thread(() -> run(address), "clipper-server-" + address);
      thread.start();
    }

    private void run(String address) {
      try {
        container.serveWhile(() -> listed.contains(address));
      } catch (Rejected refused) {
        rejected = address + ": " + refused.getMessage();
      } catch (Throwable unexpected) {
        error = unexpected;
      }
    }
  }

  /** When an address may be tried again, by System.nanoTime(), and the pause after that. */
  private record Pause(long dueNs, long nextMs) {}

  private final Model model;
  private final Options options;
  private final List<String> addresses;
  private final WarmUp warm;
  private final ReentrantLock turn = new ReentrantLock(true); // first come, first served
  private final CountDownLatch stopRequested = new CountDownLatch(1);
  private final Map<String, Server> servers = new LinkedHashMap<>();
  private final Map<String, Pause> pauses = new LinkedHashMap<>();
  private volatile Set<String> listed = Set.of();
  private String unresolved = ""; // what was printed of the last look-up

  /** Warm the model up. The model must be loaded. Throws: IllegalArgumentException. */
  AllServers(Model model, Options options) {
    this.model = model;
    this.options = options;
    addresses = List.of(options.address.split(","));
    for (String address : addresses) {
      if (!address.startsWith("unix:/")) {
        Connection.tcpPlace(address);
      }
    }
    warm = new WarmUp(model, options).run();
  }

  @Override
  public void stop() {
    stopRequested.countDown();
  }

  @Override
  public void serve() throws Rejected {
    try {
      do {
        lookUp();
        check();
      } while (!stopRequested.await(LOOK_UP_MS, TimeUnit.MILLISECONDS));
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    } finally {
      servers.values().forEach(one -> one.container.stop());
      servers.values().forEach(AllServers::join);
    }
  }

  private static void join(Server one) {
    try {
      one.thread.join();
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  /**
   * Read what the addresses stand for now. What cannot be resolved is missing, and printed once;
   * without any the last ones stay.
   */
  private void lookUp() {
    Set<String> found = new LinkedHashSet<>();
    String why = "";
    for (String address : addresses) {
      if (address.startsWith("unix:")) {
        found.add(address);
        continue;
      }
      InetSocketAddress place = Connection.tcpPlace(address);
      try {
        InetAddress[] all = InetAddress.getAllByName(place.getHostString());
        for (InetAddress one : all) {
          if (one.getClass() == all[0].getClass()) { // a host of two families is one server
            String ip = one.getHostAddress();
            String host = one instanceof Inet6Address ? "[" + ip + "]" : ip;
            found.add("tcp:" + host + ":" + place.getPort());
          }
        }
      } catch (UnknownHostException unknown) {
        why = "cannot resolve " + place.getHostString();
      }
    }
    if (!why.isEmpty() && !why.equals(unresolved)) {
      System.err.println("model '" + options.name + "': " + why + "; trying again");
    }
    unresolved = why;
    if (!found.isEmpty()) {
      List<String> most = List.copyOf(found).subList(0, Math.min(found.size(), SERVERS_MAX));
      listed = Set.copyOf(most);
    }
  }

  /** Collect connections that are over, and start those that are due. */
  private void check() throws Rejected {
    List<String> rejections = new ArrayList<>();
    long now = System.nanoTime();
    for (String address : List.copyOf(servers.keySet())) {
      Server one = servers.get(address);
      if (one.thread.isAlive()) {
        continue;
      }
      servers.remove(address);
      if (one.error != null) {
        throw new IllegalStateException("the connection to " + address + " failed", one.error);
      }
      if (!one.rejected.isEmpty() && listed.contains(address)) {
        rejections.add(one.rejected);
        System.err.println("model '" + options.name + "': rejected by " + one.rejected);
      }
      boolean lasted = now - one.startedNs > Container.BACKOFF_MS_MAX * 1_000_000;
      pause(address, lasted ? null : pauses.get(address));
    }
    if (!rejections.isEmpty() && rejections.size() == listed.size()) {
      throw new Rejected(String.join("; ", rejections));
    }
    pauses.keySet().retainAll(listed);
    for (String address : listed) {
      Pause pause = pauses.get(address);
      if (!servers.containsKey(address) && (pause == null || now - pause.dueNs() >= 0)) {
        start(address);
      }
    }
  }

  private void start(String address) {
    try {
      servers.put(address, new Server(address));
    } catch (OutOfMemoryError error) {
      System.err.println(
          "model '" + options.name + "': no thread for " + address + ": " + error.getMessage()
              + "; trying again");
      pause(address, pauses.get(address));
    }
  }

  private void pause(String address, Pause before) {
    long pauseMs = before == null ? Container.BACKOFF_MS_MIN : before.nextMs();
    long nextMs = Math.min(Container.BACKOFF_MS_MAX, 2 * pauseMs);
    pauses.put(address, new Pause(System.nanoTime() + pauseMs * 1_000_000, nextMs));
  }
}
