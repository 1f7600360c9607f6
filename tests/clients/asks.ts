// What tests/clients/installed.py compiles and runs: a client by the types that openapi-typescript made of GET /openapi.json.
import createClient from "openapi-fetch";
import type { paths } from "./queries.js";

declare const process: { argv: string[] };

const client = createClient<paths>({ baseUrl: process.argv[2] });
const { data, error } = await client.POST("/api/learns/predict", { body: { input: [1, 2, 3], user: "ann" } });
if (error || !("output" in data) || data.output !== 6) throw new Error(JSON.stringify(error ?? data));
console.log("predict");
const told = await client.POST("/api/learns/feedback", { body: { id: data.id, label: 6 } });
if (told.error || !("counted" in told.data)) throw new Error(JSON.stringify(told));
console.log("feedback");
const refused = await client.POST("/api/{application}/predict", {
  params: { path: { application: "totl" } },
  body: { input: [1, 2, 3] },
});
if (!refused.error?.hint.includes("total")) throw new Error(JSON.stringify(refused));
console.log("errors");
