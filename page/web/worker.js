// Python in a web worker. It is sent {pyodide, files} once, then questions of lab/explore/answer.py; it
// sends back {ready}, {answer} or {failed}.
"use strict";

const FOLDER = "/nanosarathi";
let answer = null;  // the function of lab/explore/answer.py

async function start({pyodide, files}) {
  const {loadPyodide} = await import(pyodide + "pyodide.mjs");
  const python = await loadPyodide({indexURL: pyodide});
  for (const [path, text] of Object.entries(files)) {
    const file = `${FOLDER}/${path}`;
    python.FS.mkdirTree(file.slice(0, file.lastIndexOf("/")));
    python.FS.writeFile(file, text);
  }
  python.runPython(`import sys; sys.path.insert(0, "${FOLDER}")`);
  ({answer} = python.pyimport("lab.explore.answer"));
}
addEventListener("message", async ({data}) => {
  try {
    if (data.files) {
      await start(data);
      postMessage({ready: true});
    } else {
      postMessage({answer: answer(data.question)});
    }
  } catch (error) {
    postMessage({failed: String(error.message ?? error)});
  }
});
