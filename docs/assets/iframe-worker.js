// Browsers run no Worker from file://. There, a hidden frame runs the site's search instead.
// Messages are copied, as a Worker would: each side changes what it gets.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      // What the script posts is for this page. It must find that out before it runs.
      this.frame.srcdoc =
        "<script>postMessage = (data) => frameElement.answer(data)</script>" +
        `<script src="${new URL(url, document.baseURI)}"></script>`;
      this.frame.answer = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }));
      this.ready = new Promise((done) => this.frame.addEventListener("load", done));
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow?.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
