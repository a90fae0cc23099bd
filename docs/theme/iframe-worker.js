// Search from a folder. Browsers start no worker for a page that was opened as a file: its script runs in a hidden
// frame instead, which has the parts of a worker that the search uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = scope.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(scope);
        scope.document.head.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
