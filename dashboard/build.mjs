// Builds the page into the Python package: `make dashboard`, or `node build.mjs [FOLDER]`.

import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const out = process.argv[2] ?? join(here, "../python/clipper/manage/dashboard/static");

await build({
  entryPoints: [join(here, "src/main.jsx")], outfile: join(out, "app.js"), absWorkingDir: here, bundle: true, minify: true, format: "esm",
  target: "es2022", jsx: "automatic", jsxImportSource: "preact", legalComments: "none", charset: "utf8", logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "src", name), join(out, name));
const parts = ["preact", "uplot"].map((name) => {
  const { version } = JSON.parse(readFileSync(join(here, "node_modules", name, "package.json")));
  return `${name} ${version}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`;
});
writeFileSync(join(out, "LICENSES.txt"), `app.js and app.css hold these, whose licences follow.\n\n${parts.join("\n----\n\n")}`);

// What was built from what, for a test that has no npm: a hash of the sources and of each file.
if (process.argv[2] === undefined) {
  const sha256 = (...paths) => paths.reduce((hash, path) => hash.update(readFileSync(path)), createHash("sha256")).digest("hex");
  const sources = [...readdirSync(join(here, "src")).sort().map((name) => join(here, "src", name)), join(here, "build.mjs"), join(here, "package-lock.json")];
  const lines = [`${sha256(...sources)}  sources`, ...readdirSync(out).sort().map((name) => `${sha256(join(out, name))}  ${name}`)];
  writeFileSync(join(here, "built.sha256"), `${lines.join("\n")}\n`);
}
