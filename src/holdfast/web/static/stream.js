// Server-sent events of a run. A lost connection is reported, and tried again ever more slowly. A page that nobody sees
// has none: browsers allow a server six connections, and six hidden tabs would use them up.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 15000;
const EVENTS = ["run", "flights", "metrics", "log", "problem", "reload"];

// `handlers` has a function for each event and `state("live" | "lost")`. After a loss the `reload` handler is called, for
// what was missed. Returns a function that closes the stream.
export function follow(address, handlers) {
  let source = null;
  let timer = 0;
  let wait = FIRST_WAIT_MS;
  let lost = false;

  function open() {
    if (source) source.close();
    source = new EventSource(address);
    source.addEventListener("open", () => {
      wait = FIRST_WAIT_MS;
      handlers.state("live");
      if (lost && handlers.reload) handlers.reload();
      lost = false;
    });
    source.addEventListener("error", () => {
      source.close();
      lost = true;
      handlers.state("lost");
      timer = setTimeout(open, wait);
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    });
    for (const name of EVENTS) {
      source.addEventListener(name, (event) => handlers[name] && handlers[name](parsed(event.data)));
    }
  }

  function again() {
    if (!lost) return;
    clearTimeout(timer);
    open();
  }

  function seen() {
    if (document.hidden) {
      clearTimeout(timer);
      source.close();
      lost = true;
    } else {
      again();
    }
  }

  open();
  window.addEventListener("online", again);
  document.addEventListener("visibilitychange", seen);
  return () => {
    window.removeEventListener("online", again);
    document.removeEventListener("visibilitychange", seen);
    clearTimeout(timer);
    source.close();
  };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}
