-- Rows on which home-made result comparisons go wrong: duplicates, NULLs, 1 and 1.0, text that is no UTF-8,
-- many columns with equal contents.
CREATE TABLE singer (id INT, name TEXT, age REAL);
INSERT INTO singer VALUES (1,'a',30),(2,'b',20),(3,'b',20),(4,NULL,20),(5,'e',NULL),(6,'1',1);
INSERT INTO singer VALUES (7, cast(x'416c626172726163ed6e' AS TEXT), 1.5), (8, 'Albarracn', 1.5);
CREATE TABLE wide (a INT, b INT, c INT, d INT, e INT, f INT, g INT, h INT);
INSERT INTO wide VALUES (1,2,3,4,5,6,7,8),(2,3,4,5,6,7,8,1),(3,4,5,6,7,8,1,2),(4,5,6,7,8,1,2,3),
  (5,6,7,8,1,2,3,4),(6,7,8,1,2,3,4,5),(7,8,1,2,3,4,5,6),(8,1,2,3,4,5,6,7);
CREATE TABLE mixed (k INT, v);
INSERT INTO mixed VALUES (1,1),(2,1.0),(3,'1'),(4,x'31'),(5,NULL),(6,''),(7,0.1),(8,9e999),(9,-0.0),(10,9007199254740993);
CREATE TABLE empty (x INT, y TEXT);
