// Loads the page. A file that does not arrive, as when the machine's network changes meanwhile, would leave it empty for
// ever: modules are not asked for again.

const RETRY_MS = 2000;

import("./app.js").catch((error) => {
  document.getElementById("main").textContent = `The page could not be loaded and is loaded again in 2 seconds: ${error.message}`;
  setTimeout(() => location.reload(), RETRY_MS);
});
